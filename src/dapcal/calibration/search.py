"""A scalar search that does not miss the minimum of a non-convex loss: a wide grid, then finer ones around the best."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.amounts import amount
from dapcal.errors import NothingToCalibrate
from dapcal.storing import Stores
from dapcal.types import DapcalWarning, Scale


@dataclass(frozen=True, eq=False)
class Curve:
    """All values of φ that were tried, ascending, with the loss and the held-out negative log-likelihood."""

    stores = Stores()

    phi: Tensor  # (M,)
    loss: Tensor  # (M,)
    nll: Tensor  # (M,)
    base_loss: float  # without adjustment
    base_nll: float
    guard: float  # NLL (plus its error) above which a φ is refused; inf without a guard
    error: Tensor  # (M,) how much more than the NLL the guard counts (`dapcal.calibration.guard`)


class Point(NamedTuple):
    """Loss and held-out NLL at one factor g(φ), and how much more the guard counts."""

    loss: float
    nll: float
    error: float = 0.0


def search(
    evaluate: Callable[[float], Point],
    scale: Scale,
    unit: float,
    guard: float | None,
    candidates: int = 100,
    span: tuple[float, float] = (1e-8, 1e6),
    rounds: int = 3,
    limited: bool = False,
    reference: float | None = None,
) -> tuple[float, Curve]:
    """φ of the smallest loss among those whose held-out NLL rises by no more than `guard`, counted with caution.

    Args:
        evaluate: loss and NLL at a factor g.
        scale: g.
        unit: factor at which typical out-of-distribution inputs are one prior scale away; the grid spans
            `span` times it, evenly in its logarithm.
        guard: tolerated rise of the NLL in nats; None for no guard.
        candidates: size of the first grid.
        span: see `unit`.
        rounds: refinements; each divides the interval around the best φ by five.
        limited: whether predictions stop changing at some distance, so that a loss that stays flat from some φ on is
            no reason for a warning.
        reference: the NLL that the guard counts from; by default the uncalibrated one.
    """
    if candidates < 3:
        raise ValueError(f"Expected `candidates` >= 3, got {candidates}")
    base = evaluate(0.0)
    # a little slack: at the smallest factors the NLL differs from the uncalibrated one by rounding
    known = base.nll if reference is None else reference
    limit = math.inf if guard is None else known + guard + 1e-7 * max(1.0, abs(known))
    steps = torch.linspace(math.log(span[0]), math.log(span[1]), candidates, dtype=torch.float64)
    reached = scale.inverse(torch.exp(steps + math.log(unit)))
    grid = reached[reached.isfinite()].unique()
    if len(grid) < 3:
        raise ValueError(
            f"The scale {scale} reaches no useful factors (typical ones lie around {amount(unit, 3)}); use a larger "
            "upper end or dapcal.calibration.scales.Exp()"
        )
    if reached.isposinf().any():  # g stays under an upper end: go on towards it
        grid = torch.cat([grid, grid[-1] + torch.arange(1.0, 9.0, dtype=torch.float64)])
    tried: dict[float, Point] = {
        phi: evaluate(float(scale(torch.tensor(phi, dtype=torch.float64)))) for phi in grid.tolist()
    }
    first, last = float(grid[0]), float(grid[-1])
    best = _best(tried, limit)
    factor = unit * span[0]
    while best is None and (factor := factor / 100) > unit * span[0] ** 3:  # spread so wide that little is too much
        smaller = scale.inverse(torch.tensor(factor, dtype=torch.float64))
        if not smaller.isfinite():
            break
        first = float(smaller)
        tried[first] = evaluate(float(scale(smaller)))
        best = _best(tried, limit)
    if best is None:
        raise NothingToCalibrate(
            f"No φ keeps the held-out NLL within {guard} nats of what it was before, {amount(known)} (the smallest "
            f"found is {amount(min(p.nll for p in tried.values()))}); raise `guard`, or set guard=None"
        )
    for _ in range(rounds):
        ordered = sorted(tried)
        place = ordered.index(best)
        lower, upper = ordered[max(place - 1, 0)], ordered[min(place + 1, len(ordered) - 1)]
        # both sides of the best apart: a grid over the whole interval meets it again, but for rounding
        for end in {lower, upper} - {best}:
            for phi in torch.linspace(end, best, 6, dtype=torch.float64)[1:-1].tolist():
                tried[phi] = evaluate(float(scale(torch.tensor(phi, dtype=torch.float64))))
        found = _best(tried, limit)
        best = best if found is None else found
    _warn_at_edge(best, tried, first, math.inf if limited else last, limit, base)
    phis = sorted(tried)
    curve = Curve(
        phi=torch.tensor(phis, dtype=torch.float64),
        loss=torch.tensor([tried[p].loss for p in phis], dtype=torch.float64),
        nll=torch.tensor([tried[p].nll for p in phis], dtype=torch.float64),
        base_loss=base.loss,
        base_nll=base.nll,
        guard=limit,
        error=torch.tensor([tried[p].error for p in phis], dtype=torch.float64),
    )
    return best, curve


def unsearched(base: Point, scale: Scale, guard: float | None, reference: float) -> tuple[float, Curve]:
    """φ where predictions do not depend on it: that of the factor 1, and a curve of this one point."""
    phi = scale.inverse(torch.ones((), dtype=torch.float64))
    phi = phi if phi.isfinite() else torch.zeros((), dtype=torch.float64)
    at = {name: torch.tensor([getattr(base, name)], dtype=torch.float64) for name in Point._fields}
    limit = math.inf if guard is None else reference + guard
    return float(phi), Curve(phi[None], **at, base_loss=base.loss, base_nll=base.nll, guard=limit)


def _best(tried: dict[float, Point], limit: float) -> float | None:
    """Smallest loss within the limit; the smaller φ among equals."""
    allowed = [phi for phi in sorted(tried) if _within(tried[phi], limit) and not math.isnan(tried[phi].loss)]
    return min(allowed, key=lambda phi: tried[phi].loss) if allowed else None


def _within(point: Point, limit: float) -> bool:
    return not math.isnan(point.nll) and (math.isinf(limit) or point.nll + point.error <= limit)


def _warn_at_edge(best: float, tried: dict[float, Point], first: float, last: float, limit: float, base: Point) -> None:
    def as_good(phi: float) -> bool:
        """Towards both ends the loss is flat, and rounding decides which φ is smallest."""
        rise = tried[phi].loss - tried[best].loss
        return _within(tried[phi], limit) and rise <= 1e-6 * abs(tried[phi].loss)

    if best == first or as_good(first):
        warnings.warn(
            f"No distance improves the calibration loss (uncalibrated {amount(base.loss)}): φ = {amount(best, 3)} is "
            "the lower edge of the search, where the posterior is left as it was. Check the OOD inputs (`ood`), or "
            "loosen the guard",
            DapcalWarning,
            stacklevel=4,
        )
    elif math.isfinite(last) and (best == last or as_good(last)):
        remedy = "Set a guard (e.g. guard=0.01)" if math.isinf(limit) else "Tighten the guard"
        warnings.warn(
            f"The calibration loss still falls at the upper edge of the search, φ = {amount(best, 3)}: it has no inner "
            f"minimum. {remedy}, or another loss",
            DapcalWarning,
            stacklevel=4,
        )
