"""Build objects from an artefact's tree, and make sure that they belong together, whoever wrote the file.

A checksum tells whether a file is as it was written, not who wrote it. So nothing is built before its class has agreed
to its fields, nothing of a size that a number in the file declares before the tensors in the file have it, and a file
counts as read when it predicts its own example.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from dapcal import inputs, likelihoods, networks, prior
from dapcal.adjust import inflate, matched, revert, reweight, transport, unchanged
from dapcal.adjust.reweight import PriorMonteCarlo
from dapcal.calibrate import Calibrated
from dapcal.calibration import ood_score, scales, search, summary
from dapcal.distances import (
    class_gaussian,
    column_checks,
    column_statistics,
    coresets,
    graph,
    inverted_lists,
    lists,
    metrics,
    neighbors,
    projectors,
    quality,
    quantised,
    radius,
    shards,
    spaces,
    standardised,
    tails,
)  # fmt: skip
from dapcal.gaussians import diagonal, full, kronecker, low_rank
from dapcal.in_file import BlockDamaged, checked
from dapcal.networks import forests, frozen_copy, plain, reading, trees, with_head_last
from dapcal.posteriors import dropout, linear, network, predictions
from dapcal.posteriors import trees as tree_posteriors
from dapcal.posteriors.dropout import DropoutPosterior
from dapcal.posteriors.network import NetworkPosterior
from dapcal.probing import check_probe
from dapcal.storing import Stores, check_fields
from dapcal.trying import predict_example

ROOMS: tuple[ModuleType, ...] = (
    sys.modules[Calibrated.__module__], network, dropout, predictions, tree_posteriors, linear, networks, inputs, prior,
    likelihoods, forests,
    inflate, revert, reweight, matched, transport, unchanged, spaces, metrics, class_gaussian, neighbors, shards,
    lists, inverted_lists, graph, quantised, coresets, quality, projectors,
    column_checks, column_statistics, tails, radius, ood_score, standardised,
    scales, search, summary, diagonal, full, kronecker, low_rank,
)  # fmt: skip
"""Where the classes live that may be stored, found by their names."""

_DEEPEST = 32  # levels of the tree; what dapcal writes has about ten
_MOST_DRAWS = 100_000  # that a number in a file may ask for
_MOST_NUMBERS = 2**28  # that such draws may have
_MARKS = ("tensor", "float", "tuple", "dict", "network", "again", "given", "kind")


def build(
    tree: Any,
    tensors: Mapping[str, Tensor],
    model: Any,
    projector: Any,
    likelihood: Any,
    place: torch.device,
    path: Any,
) -> Calibrated:
    """The calibrated posterior of a tree; arguments as in `dapcal.load`, `path` for errors."""
    reader = Reader(tensors, model, projector, likelihood, place, path)
    if isinstance(model, nn.Module):
        stored = tree.get("fields") if isinstance(tree, dict) else None
        fields, head = (stored.get(name) if isinstance(stored, dict) else None for name in ("inputs", "head"))
        with refused_if_damaged(path):
            reader.model = reading(plain(model), reader.unpack(fields, "calibrated.inputs"))
            reader.model = with_head_last(reader.model, head)
    calibrated = reader.unpack(tree, "calibrated")
    if not isinstance(calibrated, Calibrated):
        raise ValueError(f"{path} does not hold a calibrated posterior; save it again")
    with refused_if_damaged(path):
        for part in reader.built.values():  # one row takes few of the branches, so its prediction does not show this
            inputs_of = int(part.feature.max()) if isinstance(part, trees.Trees | forests.Forest) else -1
            _expect(inputs_of < calibrated.example.shape[1], "trees")
        predict_example(calibrated)
    check_probe(calibrated, reader.tensors, path)
    return calibrated


@contextmanager
def refused_if_damaged(path: str | Path) -> Iterator[None]:
    """Whatever goes wrong while parts of a file are put together, as one sentence that names the file."""
    try:
        yield
    except BlockDamaged:
        raise
    except Exception as error:
        told = " ".join(str(error).split())[:200] or "no reason given"
        raise ValueError(
            f"{path} does not fit together ({type(error).__name__}: {told}): it was changed after it was saved, or "
            "belongs to another model; save it again"
        ) from error


class Reader:
    """Builds objects from the tree; networks that features come from are the posterior's own."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
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
        self.frozen: nn.Module | None = None

    def unpack(self, node: Any, path: str, depth: int = 0) -> Any:
        """The value of a node; `path` is where it stands in the tree."""
        if node is None or isinstance(node, bool | int | str):
            return node
        mark = next((mark for mark in _MARKS if mark in node), None) if isinstance(node, dict) else None
        if mark is None or depth > _DEEPEST:
            raise self._damaged(f"something unknown stands at {path[:100]}")
        value = node[mark]
        if mark == "tensor":
            return checked(self._found(self.tensors, value, path))
        if mark == "float":
            with self._checked():
                return float.fromhex(value)
        if mark == "tuple" and isinstance(value, list):
            return tuple(self.unpack(part, f"{path}.{i}", depth + 1) for i, part in enumerate(value))
        if mark == "dict" and isinstance(value, dict):
            return {key: self.unpack(part, f"{path}.{key}", depth + 1) for key, part in value.items()}
        if mark == "network":
            if self.posterior is None:  # fields come in the order they were written, the posterior first
                raise self._damaged(f"a network is wanted at {path} before its posterior")
            return self.posterior.network
        if mark == "again":
            return self._found(self.built, value, path)
        if mark == "given":
            return self._given(node)
        return self._object(node, path, depth)

    def _object(self, node: dict[str, Any], path: str, depth: int) -> Any:
        kind, fields = _kind(node.get("kind")), node.get("fields")
        if kind is None or not isinstance(fields, dict):
            raise self._damaged(f"an unknown part {str(node.get('kind'))[:60]!r} stands at {path[:100]}")
        own = {name for name, part in fields.items() if isinstance(part, dict) and "given" in part}
        values = {name: self._field(kind, name, part, f"{path}.{name}", depth) for name, part in fields.items()}
        if "model" in own and not isinstance(values["model"], nn.Module):
            raise TypeError(f"{self.path} holds draws of a network's parameters; pass an nn.Module as `model`")
        with self._checked():
            may = vars(kind)["stores"].given
            if any(name not in may for name in own):
                raise ValueError(f"{kind.__name__} takes no code from who loads it")
            check_fields(kind, values, own)
            built = kind(**values)
            _check_sizes(built, self.posterior)
        if isinstance(built, NetworkPosterior | DropoutPosterior):
            _check_model(built, self.path)  # before features ask for its network
            self.posterior = self.posterior or built
        self.built[path] = built
        return built

    def _field(self, kind: type, name: str, node: Any, path: str, depth: int) -> Any:
        """The value of a field; the only one that stays in the file is one of which the class says so."""
        tensor = staying(kind, name, node)
        return self.unpack(node, path, depth + 1) if tensor is None else self._found(self.tensors, tensor, path)

    def _given(self, node: dict[str, Any]) -> Any:
        if set(node) != {"given", "label", "type"} or not all(isinstance(value, str) for value in node.values()):
            raise self._damaged("it says unclearly what is given at loading")
        what, label = node["given"], node["label"]
        if what == "model":
            if not isinstance(self.model, nn.Module) or label != "model":
                return self.model
            if self.frozen is None:
                self.frozen = frozen_copy(self.model)  # one for all posteriors in the file
            return self.frozen
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

    def _found(self, among: Mapping[str, Any], name: Any, path: str) -> Any:
        if not isinstance(name, str) or name not in among:
            raise self._damaged(f"what stands at {path[:100]} is missing")
        return among[name]

    def _checked(self) -> Any:
        return refused_if_damaged(self.path)

    def _damaged(self, trouble: str) -> ValueError:
        return ValueError(f"{self.path} was changed after it was saved ({trouble}); save it again")


def left_in_file(tree: Any) -> set[str]:
    """The names of the tensors in a tree that may stay in the file, because the class that has them says so."""
    found: set[str] = set()
    nodes = [tree]
    while nodes:  # not recursive: how deep a tree is, is not known yet
        node = nodes.pop()
        if isinstance(node, dict):
            kind, fields = _kind(node.get("kind")), node.get("fields")
            if kind is not None and isinstance(fields, dict):
                named = (staying(kind, name, part) for name, part in fields.items())
                found |= {tensor for tensor in named if tensor is not None}
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node
    return found


def staying(kind: type, name: str, node: Any) -> str | None:
    """The name of the tensor in a field, if it may stay in the file."""
    stores: Stores = vars(kind)["stores"]
    tensor = node.get("tensor") if isinstance(node, dict) and name in stores.in_file else None
    return tensor if isinstance(tensor, str) else None


def _kind(name: Any) -> type | None:
    """The class of this name that may be stored."""
    found = (vars(room).get(name) for room in ROOMS) if isinstance(name, str) else ()
    return next(
        (kind for kind in found if isinstance(kind, type) and isinstance(vars(kind).get("stores"), Stores)), None
    )


def _check_model(posterior: NetworkPosterior | DropoutPosterior, path: str | Path) -> None:
    """Names, shapes and types of the parameters, against those of the model."""
    own = dict([*posterior.model.named_parameters(), *posterior.model.named_buffers()])
    if isinstance(posterior, DropoutPosterior):
        stored = {n: tuple(t.shape) for n, t in posterior.state.items()}
        dtypes = {n: t.dtype for n, t in posterior.state.items()}
    else:
        stored = dict(zip(posterior.layout.names, posterior.layout.shapes, strict=True))
        stored |= {n: tuple(t.shape) for n, t in posterior.shared.items()}
        stored |= {n: tuple(t.shape[1:]) for n, t in posterior.buffers.items()}
        dtypes = dict.fromkeys(posterior.layout.names, posterior.draws.dtype)
        odd = [n for n, t in posterior.central.items() if stored.get(n) != tuple(t.shape)]
        if odd:
            raise ValueError(
                f"{path} is damaged: its network has {odd[:4]} of another shape than its draws; save it again"
            )
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


def _check_sizes(built: Any, posterior: Any) -> None:
    """Numbers that ask for memory or time, and tensors that must be as long as others, before anything relies on it."""
    if isinstance(built, NetworkPosterior):
        parameters = sum(built.layout.sizes.values())
        _expect(built.draws.ndim == 2 and built.draws.shape[1] == parameters and len(built.draws) > 0, "draws")
        _expect(built.center.shape == (parameters,) and built.center.dtype == built.draws.dtype, "center")
        _expect(all(t.ndim and len(t) == len(built.draws) for t in built.buffers.values()), "buffers")
        _expect(built.draws.is_floating_point(), "draws")
        moments = [] if built.gaussian is None else [t for t in vars(built.gaussian).values() if isinstance(t, Tensor)]
        _expect(all(t.is_floating_point() and len(t) == parameters for t in moments), "gaussian")
        _expect(built.prior is None or built.prior.group.shape == (parameters,), "prior")
    elif isinstance(built, trees.Trees):
        nodes = built.feature.shape[-1] if built.feature.ndim == 3 else 0
        _expect(built.feature.dtype == torch.int64 and nodes > 0 and nodes & (nodes + 1) == 0, "trees")
        _expect(built.threshold.shape == built.feature.shape and len(built.feature) > 0, "trees")
        _expect(built.value.shape == (*built.feature.shape[:2], nodes + 1), "trees")
        _expect(built.start.shape == (built.feature.shape[1],) and int(built.feature.min()) >= 0, "trees")
        _expect(all(t.is_floating_point() for t in (built.threshold, built.value, built.start)), "trees")
    elif isinstance(built, forests.Forest | tree_posteriors.TreePosterior):
        built.check()
    elif isinstance(built, DropoutPosterior):
        _expect(1 <= built.draws <= _MOST_DRAWS and built.seed >= 0, "draws")
        _expect(all(0 < rate <= 1 for rate in built.rates.values()), "rates")
    elif isinstance(built, PriorMonteCarlo):
        numbers = built.draws * (posterior.draws.shape[1] if isinstance(posterior, NetworkPosterior) else 1)
        _expect(built.draws <= _MOST_DRAWS and built.levels <= _MOST_DRAWS and numbers <= _MOST_NUMBERS, "draws")
    elif isinstance(built, prior.Prior):
        groups = len(built.labels)
        _expect(built.group.dtype == torch.int64 and built.group.ndim == 1 and groups > 0, "group")
        _expect(all(t.shape == (groups,) for t in (built.sigma0, built.factor, built.sizes)), "groups")
        _expect(bool((built.sigma0 > 0).all()) and bool((built.factor >= 0).all()), "sigma0")
        _expect(not built.group.numel() or (int(built.group.min()) >= 0 and int(built.group.max()) < groups), "group")
    elif isinstance(built, kronecker.KroneckerGaussian):
        indices = [block.index for block in built.blocks]
        _expect(all(i.dtype == torch.int64 and i.numel() for i in indices), "blocks")
        _expect(all(int(i.min()) >= 0 and int(i.max()) < len(built.mean) for i in indices), "blocks")
    elif isinstance(built, matched.MomentMatched):
        _expect(built.rounds <= _MOST_DRAWS, "rounds")
    elif isinstance(built, ood_score.Evidence):
        pieces, n = len(built.center), len(built.held_out)
        _expect(built.center.shape == built.scale.shape == (pieces,) and built.held_out.shape == (n,), "scores")
        _expect(built.held_out_pieces is None or built.held_out_pieces.shape == (pieces, n), "scores")
        _expect(bool((built.scale > 0).all()), "scales")
        weights = built.center.new_ones(pieces - built.beside) if built.weights is None else built.weights
        _expect(weights.shape == (pieces - built.beside,) and bool((weights >= 0).all() and weights.any()), "weights")
    elif isinstance(built, Calibrated):
        _expect(0 <= built.evidence.beside <= len(built.evidence.further), "pieces beside the sum")
        _expect(all(0 <= place < len(built.evidence.center) for place in built.evidence.alone), "pieces of the sum")
        _expect(built.evidence.sum_scale > 0 and built.evidence.times > 0, "scales")
        _expect(len(built.evidence.center) == 1 + len(built.distance.spaces) + len(built.evidence.further), "pieces")
        rows = [t for t in (built.chooses, built.judges) if t is not None]
        _expect(all(t.dtype == torch.int64 and t.ndim == 1 for t in rows), "halves")
        _expect(built.example.ndim > 1 and len(built.example) == 1, "example")


def _expect(fine: bool, what: str) -> None:
    if not fine:
        raise ValueError(f"`{what}` is not as the rest of the file has it")
