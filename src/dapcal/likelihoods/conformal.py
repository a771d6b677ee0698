"""Intervals by residuals: as wide, in predictive standard deviations, as rows that nothing was chosen on ask for.

Split conformal prediction with normalised residuals |y − mean|/sd (Lei et al. 2018, arXiv:1604.04173): of n residuals
the ⌈(n + 1) · level⌉-th smallest is the half-width. Then a new row is inside with probability `level` at least, and at
most 1/(n + 1) more, whatever the network, as long as it is exchangeable with those rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dapcal.storing import Stores


@dataclass(frozen=True, eq=False)
class Conformal:
    """Residuals of judging rows, and what the target cannot exceed.

    Attributes:
        scores: |y − mean|/sd, ascending, (n, K); none where intervals are bounded alone.
        lower: the least value of a target, in the network's unit; None: there is none.
        upper: the greatest.
    """

    stores = Stores()

    scores: Tensor
    lower: float | None = None
    upper: float | None = None

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
        n = len(self.scores)
        rank = math.ceil((n + 1) * level - 1e-9)
        if 1 <= rank <= n:
            return self.scores[rank - 1]
        return torch.cat([self.scores[-1:], self.scores.new_full((1, self.scores.shape[1]), plain)]).max(0).values

    def bounded(self, value: Tensor) -> Tensor:
        """The nearest value that a target can have."""
        if self.lower is None and self.upper is None:
            return value
        return value.clamp(self.lower, self.upper)


def scores_of(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """|y − mean|/sd of rows, ascending, (n, K)."""
    return ((y - mean).abs() / variance.sqrt()).double().sort(0).values
