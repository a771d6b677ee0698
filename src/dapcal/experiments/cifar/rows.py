"""The rows of the CIFAR-10 table, and the units that they are made in: what one training run serves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dapcal.calibrate import calibrate
from dapcal.detectors import ddu, knn, odin
from dapcal.distances import Space
from dapcal.experiments.cifar import collapse
from dapcal.experiments.cifar.bench import PhotoBench
from dapcal.experiments.cifar.task import PhotoTask
from dapcal.experiments.images.methods import Fitted, Method, adjusted, methods, posterior_alone, read_out, scored
from dapcal.networks import layer_input
from dapcal.posteriors.network import NetworkPosterior

ONE = "One network + DAP, ours"


class Unit(NamedTuple):
    """Rows of one seed that are made together, since they share what is trained."""

    name: str
    seed: int
    rows: tuple[str, ...]


def units(task: PhotoTask, first: int, full: bool) -> list[Unit]:
    """In the order in which they are made: what matters most comes first.

    Args:
        task: its members are the seeds.
        first: of the seeds.
        full: VI, SWAG, spectral normalisation and the other open questions under every seed, not the first alone.
    """
    seeds = range(first, first + task.members)
    found = [Unit("network", seed, _NETWORK) for seed in seeds]
    if task.members > 1:
        found.append(Unit("ensemble", first, _ENSEMBLE))
    several = {"variational": _VARIATIONAL, "swag": _SWAG, "questions": _QUESTIONS, "spectral": _SPECTRAL}
    found += [Unit(name, first, rows) for name, rows in several.items()]
    return found + [Unit(name, seed, rows) for name, rows in several.items() for seed in (seeds[1:] if full else ())]


def table() -> dict[str, Method]:
    """All rows, in the order of the page; those that other image tables have are theirs."""
    known = methods(())
    own = {
        "MAP": Method("paper", _with(lambda b: posterior_alone(b.map), collapse.of_map), "entropy"),
        "ODIN": Method("paper", scored(_odin, "temperature", "epsilon"), "score"),
        **{name: known[name]._replace(fit=_with(known[name].fit, _tempered)) for name in _VARIATIONAL},
        ONE: Method("ours", one_network, "OOD score"),
        "DDU, normalised features": Method(
            "newer", read_out(lambda r: ddu.fit(r.network, r.train, unit=True)), "score"
        ),
        f"{ONE}, without temperature": Method("questions", partial(one_network, temperature=False), "OOD score"),
        f"{ONE}, after temperature": Method("questions", partial(one_network, temperature=True), "OOD score"),
        f"{ONE}, earlier features": Method("questions", _earlier, "OOD score"),
        "MAP, spectral": Method(
            "questions", _with(lambda b: posterior_alone(b.spectral), collapse.of_spectral), "entropy"
        ),
        "kNN, normalised features, spectral": Method(
            "questions", scored(lambda b: knn.fit(b.spectral.network, b.train)), "score"
        ),
        f"{ONE}, spectral": Method("questions", lambda b: one_network(b, b.spectral.network), "OOD score"),
    }
    names = ("MAP", "ODIN", "DDU", "DE", *_VARIATIONAL[:2], ONE, "DE + DAP, ours", "DAP, ours", *_SWAG[::-1])
    order = dict.fromkeys((*names, *_NETWORK, *_VARIATIONAL, *_QUESTIONS, *_SPECTRAL))
    return {name: own[name] if name in own else known[name] for name in order}


def one_network(bench: Any, network: nn.Module | None = None, **options: Any) -> Fitted:
    """Our default for a trained network and nothing else: a Laplace approximation of its last layer."""
    own = bench.map.network if network is None else network
    return adjusted(calibrate(own, bench.likelihood, train=bench.train, held_out=bench.held_out, **options))


@dataclass(frozen=True, eq=False)
class Earlier:
    """What enters a group of convolutions, averaged over places."""

    network: nn.Module
    layer: str

    def __call__(self, x: Tensor) -> Tensor:
        """Features (N, C)."""
        return torch.cat([layer_input(self.network, self.layer, part).float().mean((2, 3)) for part in x.split(2048)])


def _earlier(bench: Any) -> Fitted:
    """Distances between features that have not collapsed onto classes yet: where the last group begins."""
    return one_network(bench, distance=Space(Earlier(bench.map.network, "groups.2"), name="earlier features"))


def _odin(bench: Any) -> odin.Odin:
    return odin.fit(bench.map.network, bench.held_out, most=bench.task.tuning)


def _tempered(bench: Any) -> dict[str, Any]:
    posterior: NetworkPosterior = bench.variational
    assert posterior.gaussian is not None
    return {
        "kl_weight": bench.task.kl_weight,
        "sigma0": bench.task.sigma0,
        "median_sigma": float(posterior.gaussian.variance.median().sqrt()),  # type: ignore[attr-defined]
    }


def _with(fit: Callable[[Any], Fitted], facts: Callable[[PhotoBench], dict[str, Any]]) -> Callable[[Any], Fitted]:
    def fitted(bench: PhotoBench) -> Fitted:
        found = fit(bench)
        return found._replace(facts=found.facts | facts(bench))

    return fitted


def chosen(found: Iterable[Unit], parts: tuple[str, ...] | None) -> list[Unit]:
    """Units with the rows of some parts of the table alone, without those that have none."""
    known = table()
    own = [unit._replace(rows=tuple(r for r in unit.rows if parts is None or known[r].part in parts)) for unit in found]
    return [unit for unit in own if unit.rows]


_NETWORK = (
    "MAP", ONE, "DDU", "max softmax", "max logit", "energy", "temperature scaling", "kNN, features",
    "kNN, normalised features", "Mahalanobis", "Mahalanobis++", "DDU, normalised features", "ViM", "fDBD", "GAPA",
    "DAC", "ODIN",
)  # fmt: skip
_ENSEMBLE = ("DE", "DE + DAP, ours")
_VARIATIONAL = ("VI", "DAP, paper's", "DAP, ours", "DAP, ours, after temperature")
_SWAG = ("SWAG", "SWAG + DAP, ours")
_QUESTIONS = tuple(f"{ONE}, {how}" for how in ("without temperature", "after temperature", "earlier features"))
_SPECTRAL = ("MAP, spectral", "DDU, spectral", "kNN, normalised features, spectral", f"{ONE}, spectral")
