"""How good an approximate index is: measured against exact search when it is fitted, and said in words.

Whatever an approximate index misses, it reports the true distance to a training point. So d0 is never too small; by how
much it may be too large is what is measured here. p-values are read from held-out inputs that the same index has
measured, so they stay valid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dapcal.distances.neighbors import TorchIndex
from dapcal.storing import Stores
from dapcal.types import NeighborIndex

SAMPLE = 500  # training points that are asked for their nearest other one
QUANTILE = 0.99  # of the relative errors, which is told


@dataclass(frozen=True)
class SearchQuality:
    """Nearest other training points of a sample, against exact search.

    Attributes:
        recall: share of the sample whose answer is exact.
        typical: by how much of itself the distance is too large, the median over the sample.
        excess: by how much that of 99 % of the sample is too large at most.
        largest: the same of all of it.
        sample: how many were asked.
    """

    stores = Stores()

    recall: float
    typical: float
    excess: float
    largest: float
    sample: int

    def __str__(self) -> str:
        return (
            f"recall {self.recall:.3f} on {self.sample} training points; no distance is too small, half are at most "
            f"{_percent(self.typical)} too large, {_percent(QUANTILE)} at most {_percent(self.excess)}"
        )


def _percent(share: float) -> str:
    """Two digits, written out: "0.13 %", "210 %"."""
    return f"{float(f'{100 * share:.2g}'):,.10g} %"


UNMEASURED = SearchQuality(0.0, 0.0, 0.0, 0.0, 0)


@runtime_checkable
class Judged(Protocol):
    """An approximate index, which says how good it is."""

    @property
    def quality(self) -> SearchQuality:
        """As measured at fitting."""
        ...

    @property
    def note(self) -> str:
        """What it is and how good, in words."""
        ...


@dataclass(frozen=True, eq=False)
class Reference:
    """A sample of training points, and the exact distance from each to the nearest other one."""

    points: Tensor  # (n, P)
    distances: Tensor  # (n,)
    asked: int  # neighbours that an index is asked for: 2 where each finds itself first

    def quality(self, index: NeighborIndex) -> SearchQuality:
        """What an index makes of it."""
        found = index.query(self.points, self.asked)[0][:, -1].to(self.distances)
        excess = torch.where(found > self.distances, found / self.distances - 1, 0.0).double()
        excess = excess.nan_to_num(posinf=torch.finfo(torch.float64).max)  # beside a duplicate that was missed
        return SearchQuality(
            recall=float((found <= self.distances).double().mean()),
            typical=float(excess.median()),
            excess=float(excess.quantile(QUANTILE)),
            largest=float(excess.max()),
            sample=len(self.points),
        )


def reference(points: Tensor, seed: int, lost: Tensor | None = None) -> Reference:
    """Exact distances of a sample: the last of the permutation whose first ones an index may be fitted to.

    Args:
        points: training points (T, P).
        seed: of the permutation.
        lost: points that the index does not have (T,), of which the sample is then; where there are none, of all.
    """
    rows = torch.randperm(len(points), generator=torch.Generator().manual_seed(seed)).to(points.device)
    asked = min(2, len(points))
    if lost is not None and lost.any():
        rows, asked = rows[lost[rows]], 1
    sample = points[rows[-SAMPLE:]]
    return Reference(sample, TorchIndex(points).query(sample, min(2, len(points)))[0][:, -1], asked)
