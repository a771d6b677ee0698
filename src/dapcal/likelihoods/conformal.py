"""Intervals by residuals: as wide, in predictive standard deviations, as rows that nothing was chosen on ask for.

Split conformal prediction with normalised residuals |y − mean|/sd (Lei et al. 2018, arXiv:1604.04173): of n residuals
the ⌈(n + 1) · level⌉-th smallest is the half-width. Then a new row is inside with probability `level` at least, and at
most 1/(n + 1) more, whatever the network, as long as it is exchangeable with those rows.

Where rows are few, none is spared: CV+ (Barber, Candès, Ramdas, Tibshirani 2021, arXiv:1905.02928). Members of every
fold have not seen its rows; row i has its residual s_i from them, and an interval reaches from the
⌊(n + 1)(1 − level)⌋-th smallest mean_k(i) − s_i sd_k(i) to the ⌈(n + 1) · level⌉-th smallest mean_k(i) + s_i sd_k(i),
means and deviations of the new row by the members of fold k(i). A new row is inside with probability
1 − 2 (1 − level) − √(2/n) at least, and with about `level` where members are stable.

A target that has bounds cannot be where a mean beyond them says: residuals, of judging rows and of new ones, are taken
from the nearest value that it can have. Both results hold for any such residuals, and no interval shrinks to a bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dapcal.storing import Stores

_ROWS = 1024  # that ends are sorted for at a time


class Moments(NamedTuple):
    """Of new rows, by the members of every fold; of one where there are none."""

    mean: Tensor  # (F, N, K)
    deviation: Tensor  # (F, N, K)


@dataclass(frozen=True, eq=False)
class Conformal:
    """Residuals of rows that members have not seen, and what the target cannot exceed.

    Attributes:
        scores: |y − mean|/sd, ascending, (n, K); none where intervals are bounded alone.
        lower: the least value of a target, in the network's unit; None: there is none.
        upper: the greatest.
        fold: of every score, (n, K), by whose members it was measured; None: all draws have not seen any of the rows.
    """

    stores = Stores()

    scores: Tensor
    lower: float | None = None
    upper: float | None = None
    fold: Tensor | None = None

    @property
    def folds(self) -> int:
        """F, that draws are of, one after the other and as many of each."""
        return 1 if self.fold is None else int(self.fold.max()) + 1

    def __post_init__(self) -> None:
        if self.scores.ndim != 2 or not self.scores.is_floating_point():
            raise ValueError(
                f"Expected `scores` as floating-point residuals of shape (n, K), got {self.scores.dtype} "
                f"{tuple(self.scores.shape)}"
            )
        if (self.scores < 0).any() or (self.scores.diff(dim=0) < 0).any():
            raise ValueError("Expected `scores` >= 0 and ascending; sort them, as `scores_of` does")
        lower, upper = -math.inf if self.lower is None else self.lower, math.inf if self.upper is None else self.upper
        if not lower <= upper:
            raise ValueError(f"Expected `lower` <= `upper`, got {self.lower} and {self.upper}")

    def half(self, level: float, plain: float) -> Tensor:
        """Half-width in standard deviations, (K,).

        With too few rows to say (fewer than level/(1 − level)): the largest residual, or `plain` if that is more.
        """
        rank = self._rank(level)
        if 1 <= rank <= len(self.scores):
            return self.scores[rank - 1]
        return torch.cat([self.scores[-1:], self.scores.new_full((1, self.scores.shape[1]), plain)]).max(0).values

    def ends(self, moments: Moments, level: float, plain: float) -> tuple[Tensor, Tensor]:
        """Lower and upper ends (N, K) around means within the bounds, not yet bounded themselves."""
        moments = moments._replace(mean=self.bounded(moments.mean))
        if self.fold is None:
            half = self.half(level, plain).to(moments.mean) * moments.deviation[0]
            return moments.mean[0] - half, moments.mean[0] + half
        n, rank = len(self.scores), self._rank(level)
        parts = []
        for rows in torch.arange(moments.mean.shape[1]).split(_ROWS):
            own = Moments(*(self._of_scores(part[:, rows]) for part in moments))  # (n, N, K)
            scores = self.scores.to(own.mean)[:, None] if rank <= n else self.half(level, plain).to(own.mean)
            reach = scores * own.deviation
            high = (own.mean + reach).sort(0).values[min(rank, n) - 1]
            low = (own.mean - reach).sort(0).values[max(n - rank, 0)]
            parts.append(torch.stack([low, high]))
        lower, upper = torch.cat(parts, 1)
        return lower, upper

    def bounded(self, value: Tensor) -> Tensor:
        """The nearest value that a target can have."""
        return _bounded(value, self.lower, self.upper)

    def _rank(self, level: float) -> int:
        return math.ceil((len(self.scores) + 1) * level - 1e-9)

    def _of_scores(self, moments: Tensor) -> Tensor:
        """Moments (F, N, K) of the fold of every score, (n, N, K)."""
        assert self.fold is not None
        return moments.gather(0, self.fold[:, None].expand(-1, moments.shape[1], -1).to(moments.device))


def scores_of(
    mean: Tensor, variance: Tensor, y: Tensor, lower: float | None = None, upper: float | None = None
) -> Tensor:
    """|y − mean|/sd of rows, ascending, (n, K); of a mean beyond the target's bounds from the nearest one."""
    scores = ((y - _bounded(mean, lower, upper)).abs() / variance.sqrt()).double().detach()
    if scores.device.type != "cpu":
        return scores.sort(0).values
    return torch.from_numpy(np.sort(scores.numpy(), 0))  # torch sorts places, too, which takes many times as long


def crossed(moments: Moments, y: Tensor, fold: Tensor, lower: float | None, upper: float | None) -> Conformal:
    """What residuals of rows say, each by the members of the fold (n,) that it is in.

    Args:
        moments: of the rows, by the members of every fold, (F, n, K).
        y: their targets, (n, K).
        fold: of every row.
        lower: bound of the target.
        upper: likewise.
    """
    place = fold.to(y.device)[None, :, None].expand(1, *y.shape)
    mean, deviation = (part.gather(0, place)[0] for part in moments)
    scores, order = ((y - _bounded(mean, lower, upper)).abs() / deviation).double().sort(0)
    return Conformal(scores, lower, upper, fold.to(order.device)[order])


def _bounded(value: Tensor, lower: float | None, upper: float | None) -> Tensor:
    return value if lower is None and upper is None else value.clamp(lower, upper)
