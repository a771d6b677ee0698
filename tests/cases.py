"""Cases that several test files run through."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from dapcal.adjust import Inflate, MomentMatched, Reweight, SelfNormalised, Transport, Unchanged
from dapcal.calibration import in_domain
from dapcal.calibration.search import Curve, search
from dapcal.deploy import programs
from dapcal.likelihoods import Gaussian
from dapcal.posteriors import gaussian
from dapcal.recipes import gaps


@dataclass(frozen=True)
class KnownNoise(Gaussian):
    """A Gaussian whose noise is not learnt."""

    def free(self) -> dict[str, Tensor]:
        return {}

    def at(self, free: dict[str, Tensor]) -> KnownNoise:  # noqa: ARG002
        return self


ADJUSTMENTS = {
    "inflate": Inflate(),
    "drawn": Inflate(drawn=True),
    "reweight": Reweight(),
    "self-normalised": Reweight(SelfNormalised()),
    "normalise": Reweight(normalise=True),
    "complete": Reweight(complete=True),
    "smooth": Reweight(smooth=True),
    "matched": MomentMatched(normalise=True),
    "transport": Transport(),
    "shift": Transport(shift=True),
    "unchanged": Unchanged(),
}


class Killed(Exception):
    pass


class Fragile(nn.Module):
    """A network that dies at its n-th forward pass."""

    def __init__(self, inner: nn.Module, dies_at: int | None = None) -> None:
        super().__init__()
        self.inner, self.dies_at, self.passes = inner, dies_at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        if self.passes == self.dies_at:
            raise Killed
        return self.inner(x)


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def network_posterior(likelihood, outputs, draws=30, scale=0.2):
    """A diagonal Gaussian over a network of 18 + 7 · outputs parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs))
    deviations = {n: torch.full_like(p, scale) for n, p in model.named_parameters()}
    return gaussian.diagonal(model, likelihood, deviations, draws=draws)


def inputs(n):
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(3))


def trace_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of one posterior are traced and converted once, which takes seconds; torch lists its operators once."""
    for name in ("module", "_traced", "_converted"):
        monkeypatch.setattr(programs, name, cache(getattr(programs, name)))
    registry = getattr(sys.modules.get("torch.onnx._internal.exporter._registration"), "ONNXRegistry", None)
    if hasattr(registry, "from_torchlib"):
        monkeypatch.setattr(registry, "from_torchlib", staticmethod(_operators(registry.from_torchlib)))


@cache
def _operators(listed: Callable[..., object]) -> Callable[..., object]:
    return cache(listed)


@contextmanager
def coarsely(candidates: int = 5) -> Iterator[None]:
    """Few values of φ and of a temperature, for tests of what comes before and after their search."""

    def few(*arguments, **options) -> tuple[float, Curve]:
        asked = options.get("candidates", candidates)
        return search(*arguments, **options | {"candidates": min(asked, candidates), "rounds": 0})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["dapcal.calibrate"], "search", few)  # `dapcal.calibrate` itself is the function
        patch.setattr(in_domain, "CLOSE", 0.05)
        patch.setattr(gaps, "FACTORS", gaps.FACTORS[::3])
        yield
