"""How a Laplace approximation chooses its prior scale σ0: by marginal likelihood, or on held-out data."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dapcal.data import Data, gather
from dapcal.ensembles import seen
from dapcal.networks import take
from dapcal.posteriors.network import NetworkPosterior
from dapcal.records import DapcalWarning

_HIGHEST, _HIGHEST_OF_ALL = 1e2, 1e6  # candidates for σ0 on held-out data
_GAIN = 1e-3  # nats; a wide prior no longer matters where data decide, and one step more gains less


class Candidates(Protocol):
    """The approximation at any prior scale."""

    def log_evidence(self, sigma0: float) -> float:
        """Log marginal likelihood, up to a constant."""
        ...

    def posterior(self, sigma0: float, drawn: bool = True) -> NetworkPosterior:
        """The posterior; without its draws (unless `drawn`) where closed-form moments do."""
        ...


class ScaleChoice(Protocol):
    """How σ0 is chosen."""

    def __call__(self, candidates: Candidates) -> float:
        """The chosen σ0."""
        ...


@dataclass(frozen=True)
class MarginalLikelihood:
    """The σ0 with the largest log p(y | x) ≈ log p(y | μ) − ½ [log det(H + δ) − log det δ + δ‖μ‖²], δ = 1/σ0²."""

    lowest: float = 1e-3
    highest: float = 1e3

    def __post_init__(self) -> None:
        _check_range(self.lowest, self.highest)

    def __call__(self, candidates: Candidates) -> float:
        """By a bounded search in log σ0, from the best of a grid."""
        from scipy.optimize import minimize_scalar

        grid = np.linspace(np.log(self.lowest), np.log(self.highest), 61)
        values = [candidates.log_evidence(float(np.exp(t))) for t in grid]
        best = int(np.argmax(values))
        if best in (0, len(grid) - 1):
            _warn_at_edge(float(np.exp(grid[best])))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        found = minimize_scalar(
            lambda t: -candidates.log_evidence(float(np.exp(t))), bounds=(low, high), method="bounded"
        )
        return float(np.exp(found.x))


@dataclass(frozen=True, eq=False)
class HeldOut:
    """The σ0 with the smallest negative log-likelihood on held-out data.

    The network itself is the limit σ0 → 0, so that the smallest candidate is as good an answer as any.

    Args:
        data: (inputs, targets), a Dataset or a DataLoader.
        lowest: smallest candidate.
        highest: largest candidate; by default 100, and on from there, up to a million, while that gains.
        steps: candidates up to there, evenly spaced in log σ0.
    """

    data: Data
    lowest: float = 1e-4
    highest: float | None = None
    steps: int = 31

    def __post_init__(self) -> None:
        _check_range(self.lowest, _HIGHEST if self.highest is None else self.highest)
        if self.steps < 2:
            raise ValueError(f"Expected `steps` >= 2, got {self.steps}")

    def __call__(self, candidates: Candidates) -> float:
        """Try them all."""
        taken = take(candidates.posterior(self.lowest, drawn=False), {"data": self.data})
        held_out = gather(taken.data["data"], "data")

        def nll(sigma0: float) -> float:
            posterior = candidates.posterior(sigma0, drawn=False)
            base = seen(posterior, held_out.x)
            targets = posterior.likelihood.check(base.outputs, held_out.y.to(base.outputs.device))
            return float(-posterior.likelihood.log_prob(base, targets).mean())

        grid = np.geomspace(self.lowest, _HIGHEST if self.highest is None else self.highest, self.steps).tolist()
        values = [nll(sigma0) for sigma0 in grid]
        while self.highest is None and _gains_at_edge(values) and grid[-1] < 0.99 * _HIGHEST_OF_ALL:
            grid.append(grid[-1] * grid[-1] / grid[-2])
            values.append(nll(grid[-1]))
        best = grid[int(np.argmin(values))]
        if _gains_at_edge(values):
            _warn_at_edge(best)
        return best


def _gains_at_edge(values: list[float]) -> bool:
    """Whether the largest candidate is the best, and not merely as good as any large one."""
    return values[-1] == min(values) and values[-1] < values[-2] - _GAIN


def _check_range(lowest: float, highest: float) -> None:
    if not 0 < lowest < highest < float("inf"):
        raise ValueError(f"Expected 0 < `lowest` < `highest`, got {lowest} and {highest}")


def _warn_at_edge(sigma0: float) -> None:
    warnings.warn(
        f"The best prior scale is at the edge of the search, {sigma0:.4g}; widen `lowest` and `highest`, or give "
        "`prior_scale` as a number",
        DapcalWarning,
        stacklevel=5,
    )
