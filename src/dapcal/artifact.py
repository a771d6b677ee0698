"""Save and load a calibrated posterior: one safetensors file with a JSON description, no pickle.

Stored: the posterior's draws and moments, the likelihood, projectors, training points, radii, φ, the calibration curve
and held-out scores. Not stored: the network's code (give the model again) and callables that you wrote (a projector, a
likelihood, a function that returns stacked predictions: give them again). Opening checks format, version, checksum and
finiteness; loading checks names, shapes and dtypes against the model. Whoever saves may add a description (`about`) and
tensors (`attachments`), which come back as they were: what a table's columns mean, training rows to show.

What is stored of a class stands in the class (`dapcal.storing`).
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dapcal import inputs, likelihoods, networks, prior
from dapcal.adjust import inflate, matched, revert, reweight, transport, unchanged
from dapcal.calibrate import Calibrated
from dapcal.calibration import ood_score, scales, search, summary
from dapcal.distances import class_gaussian, metrics, neighbors, projectors, radius, spaces
from dapcal.gaussians import diagonal, full, kronecker, low_rank
from dapcal.networks import frozen_copy, plain, reading
from dapcal.posteriors import dropout, linear, network, predictions
from dapcal.posteriors.dropout import DropoutPosterior
from dapcal.posteriors.network import NetworkPosterior
from dapcal.saving import ATTACHED, FORMAT, VERSION, digest, save
from dapcal.storing import Stores

__all__ = ["Stored", "load", "open", "save"]

ROOMS: tuple[ModuleType, ...] = (
    sys.modules[Calibrated.__module__], network, dropout, predictions, linear, networks, inputs, prior,
    likelihoods,
    inflate, revert, reweight, matched, transport, unchanged, spaces, metrics, class_gaussian, neighbors, projectors,
    radius, ood_score, scales, search, summary, diagonal, full, kronecker, low_rank,
)  # fmt: skip
"""Where the classes live that may be stored, found by their names."""


def load(
    path: str | Path,
    model: nn.Module | Callable[[Tensor], Tensor],
    projector: Callable[[Tensor], Tensor] | Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    likelihood: likelihoods.Likelihood | None = None,
    device: str | torch.device | None = None,
) -> Calibrated:
    """Read what `Calibrated.save` wrote.

    Args:
        path: the file.
        model: the network (its weights do not matter), or the function of `StackedPredictions`.
        projector: the callable, where the distance uses one that you wrote; several by the name of their space.
        likelihood: where you wrote it.
        device: where predictions run; by default where the model is.
    """
    return open(path).calibrated(model, projector, likelihood, device)


def open(path: str | Path) -> Stored:
    """Read and check a file, once: what stands beside the posterior needs no model."""
    description, tensors = _read(Path(path))
    attachments = {n.removeprefix(ATTACHED): t for n, t in tensors.items() if n.startswith(ATTACHED)}
    own = {n: t for n, t in tensors.items() if not n.startswith(ATTACHED)}
    return Stored(path, description.get("about", {}), attachments, description["tree"], own)


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """A file that was read and found to be whole.

    Attributes:
        path: where it was read.
        about: what whoever saved it says of it, as JSON holds it.
        attachments: tensors that were saved beside the posterior.
    """

    path: str | Path
    about: dict[str, Any]
    attachments: dict[str, Tensor]
    tree: Any
    tensors: dict[str, Tensor]

    def calibrated(
        self,
        model: nn.Module | Callable[[Tensor], Tensor],
        projector: Callable[[Tensor], Tensor] | Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        likelihood: likelihoods.Likelihood | None = None,
        device: str | torch.device | None = None,
    ) -> Calibrated:
        """The calibrated posterior; arguments as in `load`."""
        if device is not None and isinstance(model, nn.Module):
            model = frozen_copy(model).to(device)
        place = _device_of(model) if device is None else torch.device(device)
        reader = _Reader(self.tensors, model, projector, likelihood, place, self.path)
        if isinstance(model, nn.Module):
            fields = reader.unpack(self.tree.get("fields", {}).get("inputs"), "calibrated.inputs")
            reader.model = reading(plain(model), fields)
        calibrated = reader.unpack(self.tree, "calibrated")
        if not isinstance(calibrated, Calibrated):
            raise ValueError(f"{self.path} does not hold a calibrated posterior")
        return calibrated


def _kind(name: str) -> type | None:
    """The class of this name that may be stored."""
    found = (vars(room).get(name) for room in ROOMS)
    return next(
        (kind for kind in found if isinstance(kind, type) and isinstance(vars(kind).get("stores"), Stores)), None
    )


class _Reader:
    """Builds objects from the tree; networks that features come from are the posterior's own."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        model: Any,
        projector: Any,
        likelihood: Any,
        device: torch.device,
        path: str | Path,
    ) -> None:
        self.path = path
        self.labels: set[str] = set()  # of projectors of the user's own
        self.tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        self.model, self.projector, self.likelihood = model, projector, likelihood
        self.built: dict[str, Any] = {}  # by path
        self.posterior: NetworkPosterior | DropoutPosterior | None = None

    def unpack(self, node: Any, path: str) -> Any:
        if node is None or isinstance(node, bool | int | str):
            return node
        if "tensor" in node:
            return self.tensors[node["tensor"]]
        if "float" in node:
            return float.fromhex(node["float"])
        if "tuple" in node:
            return tuple(self.unpack(part, f"{path}.{i}") for i, part in enumerate(node["tuple"]))
        if "dict" in node:
            return {key: self.unpack(part, f"{path}.{key}") for key, part in node["dict"].items()}
        if "network" in node:
            if self.posterior is None:  # fields come in the order they were written, the posterior first
                raise ValueError(f"The file asks for a network at {path} before its posterior")
            return self.posterior.network
        if "again" in node:
            return self.built[node["again"]]
        if "given" in node:
            return self._given(node)
        kind = _kind(node.get("kind"))
        if kind is None:
            raise ValueError(f"The file holds an unknown part {node.get('kind')!r} at {path}")
        built = kind(**{name: self.unpack(part, f"{path}.{name}") for name, part in node["fields"].items()})
        if isinstance(built, NetworkPosterior | DropoutPosterior):
            _check_model(built, self.path)  # before features ask for its network
            self.posterior = self.posterior or built
        self.built[path] = built
        return built

    def _given(self, node: dict[str, Any]) -> Any:
        what, label = node["given"], node["label"]
        if what == "model":
            return frozen_copy(self.model) if isinstance(self.model, nn.Module) and label == "model" else self.model
        given = self.projector if what == "projector" else self.likelihood
        if what == "projector" and not isinstance(given, Mapping):
            self.labels.add(label)
            if len(self.labels) > 1:
                raise ValueError(
                    "This file was saved with several of your projectors; pass them by the name of their space: "
                    f"projector={{{', '.join(f'{name!r}: ...' for name in sorted(self.labels))}}}"
                )
        if isinstance(given, Mapping):
            given = given.get(label)
        if given is None:
            raise ValueError(
                f"This file was saved with your {what} ({node['type']}, {label!r}), which is not stored; pass "
                f"it: dapcal.load(path, model, {what}=...)"
            )
        return given


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if path.is_dir():
        raise IsADirectoryError(f"Expected a file that dapcal saved, but {path} is a folder; name the file")
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}")
    path.open("rb").close()  # safetensors calls a file that may not be read missing
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if "dapcal" not in metadata:
                raise ValueError(f"{path} is a safetensors file, but not one of dapcal's")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or not an artefact of dapcal's ({error}); save it again") from error
    try:
        description = json.loads(metadata["dapcal"])
    except ValueError:
        description = None
    if not isinstance(description, dict):
        raise ValueError(f"{path} was changed after it was saved (its description is not a JSON object); save it again")
    if description.get("format") != FORMAT or description.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {description.get('version')}, this dapcal reads version {VERSION}; "
            "use the version of dapcal that wrote it, or a later one"
        )
    if digest(metadata["dapcal"], tensors) != metadata.get("sha256"):
        raise ValueError(f"{path} was changed after it was saved (its checksum does not match); save it again")
    # the curve alone may hold NaN or inf: where weights overflow the loss is not defined
    infinite = [n for n, t in tensors.items() if ".curve." not in n and not t.isfinite().all()]
    if infinite:
        raise ValueError(f"{path} holds NaN or inf in {infinite[:4]}; calibrate again")
    return description, tensors


def _check_model(posterior: NetworkPosterior | DropoutPosterior, path: str | Path) -> None:
    if not isinstance(posterior.model, nn.Module):
        raise TypeError(f"{path} holds draws of a network's parameters; pass an nn.Module as `model`")
    own = dict([*posterior.model.named_parameters(), *posterior.model.named_buffers()])
    if isinstance(posterior, DropoutPosterior):
        stored = {n: tuple(t.shape) for n, t in posterior.state.items()}
        dtypes = {n: t.dtype for n, t in posterior.state.items()}
    else:
        stored = dict(zip(posterior.layout.names, posterior.layout.shapes, strict=True))
        stored |= {n: tuple(t.shape) for n, t in posterior.shared.items()}
        stored |= {n: tuple(t.shape[1:]) for n, t in posterior.buffers.items()}
        dtypes = dict.fromkeys(posterior.layout.names, posterior.draws.dtype)
    if set(own) != set(stored):
        odd = sorted(set(own) ^ set(stored))
        raise ValueError(f"{path} is of another model: {odd[:4]} are parameters of only one of the two")
    for name, shape in stored.items():
        if tuple(own[name].shape) != tuple(shape):
            raise ValueError(
                f"{path} is of another model: `{name}` has shape {tuple(own[name].shape)} here and {tuple(shape)} there"
            )
    for name, dtype in dtypes.items():
        if own[name].dtype != dtype:
            raise ValueError(f"{path} was saved in {dtype}, the model has {own[name].dtype}; convert the model")


def _device_of(model: Any) -> torch.device:
    first = next(iter(model.parameters()), None) if isinstance(model, nn.Module) else None
    return torch.device("cpu") if first is None else first.device
