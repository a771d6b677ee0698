"""Save and load a calibrated posterior: one safetensors file with a JSON description, no pickle.

Stored: the posterior's draws and moments, the likelihood, projectors, training points, radii, φ, the calibration curve
and held-out scores. Not stored: the network's code (give the model again) and callables that you wrote (a projector, a
likelihood, a function that returns stacked predictions: give them again). Opening checks format, version, checksum and
finiteness; loading checks names, shapes and dtypes against the model, and what it answers at a few inputs
(`dapcal.probing`). The training points of a large index and large
attachments stay in the file: they are mapped into memory, and checked block by block when they are first used
(`dapcal.in_file`). Whoever saves may add a description (`about`) and
tensors (`attachments`), which come back as they were: what a table's columns mean, training rows to show. A checksum
tells that a file is as it was written; who wrote it, only a signature tells (`dapcal.signing`).

What is stored of a class stands in the class (`dapcal.storing`).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dapcal import container, likelihoods
from dapcal.blocks import all_finite
from dapcal.calibrate import Calibrated
from dapcal.in_file import InFile, checked
from dapcal.networks import frozen_copy
from dapcal.reading import build, left_in_file
from dapcal.records import DapcalWarning
from dapcal.saving import ATTACHED, FORMAT, VERSION, save
from dapcal.signing import verifier

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

__all__ = ["Stored", "load", "open", "save"]

VERSIONS = (1, VERSION)


def load(
    path: str | Path,
    model: nn.Module | Callable[[Tensor], Tensor] | None,
    projector: Callable[[Tensor], Tensor] | Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    likelihood: likelihoods.Likelihood | None = None,
    device: str | torch.device | None = None,
    key: str | Path | Ed25519PublicKey | None = None,
) -> Calibrated:
    """Read what `Calibrated.save` wrote.

    Args:
        path: the file.
        model: the network (its weights do not matter), the function of `StackedPredictions`, or None for draws that are
            trees (`TreePosterior`), which need no code.
        projector: the callable, where the distance uses one that you wrote; several by the name of their space.
        likelihood: where you wrote it.
        device: where predictions run; by default where the model is.
        key: a public Ed25519 key, or its PEM file: a file that its owner has not signed is refused.
    """
    return open(path, key).calibrated(model, projector, likelihood, device)


def open(path: str | Path, key: str | Path | Ed25519PublicKey | None = None) -> Stored:
    """Read and check a file, once: what stands beside the posterior needs no model; `key` as in `load`.

    Large tensors that stay in the file are checked when they are used, or by `Stored.check`.
    """
    description, content = _read(Path(path), key)
    tensors = content.tensors
    attachments = {n.removeprefix(ATTACHED): t for n, t in tensors.items() if n.startswith(ATTACHED)}
    own = {n: t for n, t in tensors.items() if not n.startswith(ATTACHED)}
    is_signed = content.signature is not None
    return Stored(path, description.get("about", {}), attachments, description["tree"], own, content.version, is_signed)


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """A file that was read and found to be whole, as far as it was read.

    Attributes:
        path: where it was read.
        about: what whoever saved it says of it, as JSON holds it.
        attachments: tensors that were saved beside the posterior.
        tree: what the posterior is made of.
        tensors: of the posterior, by their place in the tree.
        version: of the file's format.
        is_signed: by whomever; by the key where one was asked for.
    """

    path: str | Path
    about: dict[str, Any]
    attachments: dict[str, Tensor]
    tree: Any
    tensors: dict[str, Tensor]
    version: int
    is_signed: bool

    def calibrated(
        self,
        model: nn.Module | Callable[[Tensor], Tensor] | None,
        projector: Callable[[Tensor], Tensor] | Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        likelihood: likelihoods.Likelihood | None = None,
        device: str | torch.device | None = None,
    ) -> Calibrated:
        """The calibrated posterior; arguments as in `load`, `model` is None where draws need no code."""
        if device is not None and isinstance(model, nn.Module):
            model = frozen_copy(model).to(device)
        place = _device_of(model) if device is None else torch.device(device)
        return build(self.tree, self.tensors, model, projector, likelihood, place, self.path)

    def check(self) -> None:
        """Read what has stayed in the file, all of it; a ValueError names the first block that is damaged."""
        for tensor in (*self.tensors.values(), *self.attachments.values()):
            checked(tensor)


def _read(path: Path, key: str | Path | Ed25519PublicKey | None) -> tuple[dict[str, Any], container.Content]:
    if path.is_dir():
        raise IsADirectoryError(f"Expected a file that dapcal saved, but {path} is a folder; name the file")
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}")
    with _damage_told(path):
        content = container.read(path, partial(_may_stay, path))
    description = _description(content.text, path)
    version = description.get("version")
    if description.get("format") != FORMAT or version not in VERSIONS:
        raise ValueError(
            f"{path} has format version {str(version)[:20]}, this dapcal reads versions 1 and {VERSION}; "
            "use the version of dapcal that wrote it, or a later one"
        )
    with _damage_told(path):
        content.check()
    _check_signature(content, path, key)
    if version != content.version or not {"tree", "about"} <= set(description):
        raise ValueError(f"{path} was changed after it was saved (its description lacks a part); save it again")
    # the curve alone may hold NaN or inf: where weights overflow the loss is not defined
    read = {n: t for n, t in content.tensors.items() if ".curve." not in n and not isinstance(t, InFile)}
    infinite = [name for name, tensor in read.items() if not all_finite(tensor)]
    if infinite:
        raise ValueError(f"{path} holds NaN or inf in {infinite[:4]}; calibrate again")
    return description, content


def _check_signature(content: container.Content, path: Path, key: str | Path | Ed25519PublicKey | None) -> None:
    signature = content.signature
    if key is None:
        if signature is not None:
            warnings.warn(
                f"{path} is signed, and nothing asks by whom; give the public key to know (key=..., --key)",
                DapcalWarning,
                stacklevel=4,
            )
        return
    is_signed = verifier(key)
    if signature is None:
        raise ValueError(f"{path} is not signed, and a key was given to verify it; have it signed by its author")
    if not is_signed(content.seal, signature):
        owner = f"{key}" if isinstance(key, str | Path) else "that was given"
        raise ValueError(f"{path} was not signed by the key {owner}; do not use it, or find out who made it")


@contextmanager
def _damage_told(path: Path) -> Iterator[None]:
    try:
        yield
    except container.Foreign:
        raise ValueError(f"{path} is a safetensors file, but not one of dapcal's; name what dapcal saved") from None
    except container.Changed as error:
        raise ValueError(f"{path} was changed after it was saved ({error}); save it again") from error
    except container.Damaged as error:
        raise ValueError(f"{path} is truncated or not an artefact of dapcal's ({error}); save it again") from error


def _description(text: str, path: Path) -> dict[str, Any]:
    try:
        description = container.parsed(text)
    except ValueError:
        description = None
    if not isinstance(description, dict) or not isinstance(description.get("about", {}), dict):
        raise ValueError(f"{path} was changed after it was saved (its description is not a JSON object); save it again")
    return description


def _may_stay(path: Path, text: str, names: Collection[str]) -> set[str]:
    """Those of large tensors that may stay in the file: attachments, and what a class says so of."""
    said = left_in_file(_description(text, path).get("tree"))
    return {name for name in names if name in said or name.startswith(ATTACHED)}


def _device_of(model: Any) -> torch.device:
    first = next(iter(model.parameters()), None) if isinstance(model, nn.Module) else None
    return torch.device("cpu") if first is None else first.device
