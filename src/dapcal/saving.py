"""Write a calibrated posterior to one safetensors file; `dapcal.artifact` reads it and says what is in it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from dapcal import container
from dapcal.blocks import all_finite
from dapcal.calibration.ood_score import Evidence
from dapcal.distances import Distance
from dapcal.distances.projectors import LayerFeatures
from dapcal.files import complete_or_absent
from dapcal.networks import same_weights
from dapcal.probing import Probed, probe
from dapcal.signing import signer
from dapcal.storing import Stores

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

FORMAT = "dapcal"
VERSION = 2
ATTACHED = "further."  # prefix of tensors that are not part of the posterior


class Storable(Probed, Protocol):
    """A calibrated posterior, as far as its check before saving needs it."""

    @property
    def distance(self) -> Distance:
        """Fitted pre-distance d0."""
        ...

    @property
    def evidence(self) -> Evidence:
        """OOD score and p-values."""
        ...


def save(
    calibrated: Storable,
    path: str | Path,
    about: Mapping[str, Any] | None = None,
    attachments: Mapping[str, Tensor] | None = None,
    sign: str | Path | Ed25519PrivateKey | None = None,
) -> None:
    """Write the file, complete or not at all.

    Args:
        calibrated: what is saved.
        path: the file; an earlier one of that name is replaced at the very end.
        about: anything that JSON can hold, for `Stored.about`.
        attachments: finite tensors, for `Stored.attachments`.
        sign: a private Ed25519 key, or its PEM file (`dapcal.signing`).
    """
    signed = None if sign is None else signer(sign)
    tensors: dict[str, Tensor] = {}
    for name, tensor in (attachments or {}).items():
        if not all_finite(tensor):  # loading would take it for a damaged file
            raise ValueError(f"Expected finite `attachments`, got NaN or inf in {name!r}; drop or impute them")
    _check_features(calibrated)
    tree = _pack(calibrated, "calibrated", tensors, {})
    tensors |= probe(calibrated)
    tensors |= {f"{ATTACHED}{name}": _in_memory(tensor) for name, tensor in (attachments or {}).items()}
    description = json.dumps({"format": FORMAT, "version": VERSION, "tree": tree, "about": dict(about or {})})
    try:
        with complete_or_absent(path) as part, part.open("wb") as file:
            container.write(file, description, tensors, signed)
    except OSError as error:
        raise OSError(
            f"Could not write {path}: {error}; an earlier file of that name is untouched. Check free space and "
            "permissions"
        ) from error


def _check_features(calibrated: Storable) -> None:
    """Features are stored by their layer's name, so their network must be the posterior's."""
    for space in (*calibrated.distance.spaces, *calibrated.evidence.further):
        own, network = space.projector, calibrated.posterior.network
        if isinstance(own, LayerFeatures) and (network is None or not same_weights(own.network, network)):
            raise TypeError(
                f"Cannot store features of a network that is not the posterior's ({space.name}); wrap them in a "
                "function that you have written, which is given again at loading"
            )


def _pack(value: Any, path: str, tensors: dict[str, Tensor], before: dict[int, str]) -> Any:
    """A JSON tree; tensors go to the table under their path, and paths of what has been stored before by its id."""
    if isinstance(value, Tensor):
        tensors[path] = _in_memory(value)
        return {"tensor": path}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    stores = _stores(value)
    if stores is not None:
        before.setdefault(id(value), path)
        return {
            "kind": type(value).__name__,
            "fields": {n: _pack_field(value, n, stores, path, tensors, before) for n in _fields(value)},
        }
    if isinstance(value, tuple | list):
        return {"tuple": [_pack(part, f"{path}.{i}", tensors, before) for i, part in enumerate(value)]}
    if isinstance(value, dict):
        return {"dict": {key: _pack(part, f"{path}.{key}", tensors, before) for key, part in value.items()}}
    raise TypeError(
        f"Cannot store a {type(value).__name__} ({path}): only dapcal's own parts are stored, and projectors, "
        "likelihoods and models are given again at loading"
    )


def _in_memory(tensor: Tensor) -> Tensor:
    """A tensor as it is written; what stays in another file is checked first, all of it."""
    return tensor.detach().cpu().contiguous()


def _pack_field(
    owner: Any, name: str, stores: Stores, path: str, tensors: dict[str, Tensor], before: dict[int, str]
) -> Any:
    value = getattr(owner, name)
    if name == stores.again and id(value) in before:
        return {"again": before[id(value)]}
    if name == stores.network:
        return {"network": True}
    if name in stores.given and _stores(value) is None:
        label = getattr(owner, "name", name) if name == "projector" else name
        return {"given": stores.given[name], "label": label, "type": type(value).__name__}
    return _pack(value, f"{path}.{name}", tensors, before)


def _stores(value: Any) -> Stores | None:
    """What is stored of an object; None for one whose class does not say it itself, or is not dapcal's own."""
    kind = type(value)
    stores = vars(kind).get("stores")
    return stores if isinstance(stores, Stores) and kind.__module__.startswith("dapcal.") else None


def _fields(value: Any) -> list[str]:
    if isinstance(value, tuple):
        return list(value._fields)  # type: ignore[attr-defined]
    return [f.name for f in dataclasses.fields(value) if f.init]
