"""How surprising numbers are: −log of the share of training rows that reach them, for many statistics at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dapcal.storing import Stores

_HEAVY = 2.0  # beyond all training rows the tail falls as that of Pareto's law with this exponent
_NARROWEST = 0.05  # width of a tail, in the statistic's unit (standard deviations, as a rule)
_ALL, _FURTHER = 256, 256  # largest values that are kept one by one, and of those below at growing steps


@dataclass(frozen=True, eq=False)
class Tails:
    """−log p of M statistics, larger = rarer; p = (1 + #{training rows >= value})/(n + 1), and beyond them all less.

    Attributes:
        knots: training values, ascending, (M, K); the lowest number stands for rows that say nothing.
        counts: training rows that reach them, (M, K).
        rows: n, of each statistic, (M,).
        largest: training value, (M,); 0 where there is none.
        width: from the 90 % quantile to the largest, floored, (M,).
        in_nats: whether a statistic is −log of a probability itself, so that what exceeds the largest training value
            counts as it is, (M,).
    """

    stores = Stores()

    knots: Tensor
    counts: Tensor
    rows: Tensor
    largest: Tensor
    width: Tensor
    in_nats: Tensor
    _surprise: Tensor = field(init=False, repr=False)  # at each knot, and beyond all, (M, K + 1)

    def __post_init__(self) -> None:
        reached = torch.cat([self.counts, torch.zeros_like(self.counts[:, :1])], 1).double()
        object.__setattr__(self, "_surprise", (self.rows[:, None] + 1).log() - (reached + 1).log())

    def __call__(self, values: Tensor) -> Tensor:
        """Surprise (M, N) in float64; 0 at values of −inf, which say nothing."""
        values = values.float().contiguous()  # as the knots: equal values stay equal
        ordinary = self._surprise.gather(1, torch.searchsorted(self.knots, values))  # the first knot that is as large
        beyond = (values.double() - self.largest[:, None]).clamp_min(0) * (self.rows[:, None] > 0)
        further = torch.where(self.in_nats[:, None], beyond, _HEAVY * (beyond / self.width[:, None]).log1p())
        return torch.where(values == -torch.inf, 0.0, ordinary + further)


def fit_tails(values: Tensor, in_nats: Tensor) -> Tails:
    """Learn M tails from training values (M, T), −inf where a row says nothing."""
    ascending = values.float().sort(1).values  # (M, T), those that say nothing first
    rows = (ascending > -torch.inf).sum(1)
    largest = torch.where(rows > 0, ascending[:, -1], 0.0).double()
    high = ascending.shape[1] - 1 - rows // 10
    width = largest - ascending.gather(1, high[:, None])[:, 0].double()
    knots = ascending[:, _ranks(ascending.shape[1]).to(values.device)].contiguous()
    return Tails(
        knots=knots.clamp_min(torch.finfo(knots.dtype).min),  # a file may hold finite numbers alone
        counts=ascending.shape[1] - torch.searchsorted(ascending, knots),
        rows=rows.double(),
        largest=largest,
        width=torch.where(rows > 0, width, 1.0).clamp_min(_NARROWEST),
        in_nats=in_nats.to(values.device),
    )


def _ranks(rows: int) -> Tensor:
    """Places of the order statistics that are kept, ascending: the largest one by one, others further and further."""
    if rows <= _ALL + _FURTHER:
        return torch.arange(rows)
    from_top = torch.logspace(torch.tensor(_ALL).log10().item(), torch.tensor(rows - 1).log10().item(), _FURTHER)
    kept = torch.cat([torch.arange(_ALL), from_top.round().long()]).unique()
    return rows - 1 - kept.flip(0)
