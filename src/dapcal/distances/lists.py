"""Training points in lists around centers, found by k-means: what indexes of inverted lists share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dapcal.distances.direct import nearest_among
from dapcal.distances.neighbors import TorchIndex
from dapcal.storing import Stores

_ROUNDS = 6  # of k-means
_PER_LIST = 32  # points that a center is fitted to, about


@dataclass(frozen=True, eq=False)
class Lists:
    """Which points lie in which list, and where its center is. A place is a point's position in the order of lists.

    Attributes:
        order: the training point at each place, (T,).
        starts: places where lists start and end, (L + 1,).
        centers: of the lists, (L, P).
    """

    stores = Stores()

    order: Tensor
    starts: Tensor
    centers: Tensor

    def __post_init__(self) -> None:
        total, lists = len(self.order), len(self.centers)
        fine = all(t.dtype == torch.int64 and t.ndim == 1 for t in (self.order, self.starts)) and total > 0 < lists
        if not fine or len(self.starts) != lists + 1 or not self._hold_all(total):
            raise ValueError("Expected lists that hold every training point once, got others; fit the index again")

    def _hold_all(self, total: int) -> bool:
        ends = int(self.starts[0]) == 0 and int(self.starts[-1]) == total and bool((self.starts.diff() >= 0).all())
        inside = int(self.order.min()) >= 0 and int(self.order.max()) < total
        return ends and inside and bool((self.order.bincount(minlength=total) == 1).all())

    @cached_property
    def bounds(self) -> list[int]:
        """Where lists start and end, as whole numbers."""
        return self.starts.tolist()

    @cached_property
    def _by_center(self) -> TorchIndex:
        return TorchIndex(self.centers)

    def searched(self, queries: Tensor, probes: int) -> Tensor:
        """The lists with the nearest centers, (N, probes)."""
        return self._by_center.query(queries, probes)[1]

    def enough(self, k: int) -> int:
        """How many lists hold k points, whichever they are."""
        fewer = int((self.starts.diff().sort().values.cumsum(0) < k).sum())
        return min(fewer + 1, len(self.centers))

    def nearest(self, points: Tensor, queries: Tensor, places: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Distances and indices of the k nearest points at some places (N, c), ties by index; −1 is not a place.

        Args:
            points: training points in the order of places, (T, P).
            queries: (N, P).
            places: candidates.
            k: neighbours.
        """
        by_index = self.order[places.clamp_min(0)].argsort(1)
        distances, found = nearest_among(points, queries, places.gather(1, by_index), k)
        return distances, self.order[found.clamp_min(0)]


def in_lists(points: Tensor, number: int | None, seed: int, memory: int) -> Lists:
    """Fit lists to points, by default about the square root of their number."""
    count = min(len(points), number or max(1, round(math.sqrt(len(points)))))
    centers = means(points, count, seed)
    assigned = TorchIndex(centers, memory).query(points, 1)[1][:, 0]
    sizes = assigned.bincount(minlength=count)
    return Lists(assigned.argsort(stable=True), torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]), centers)


def means(points: Tensor, number: int, seed: int) -> Tensor:
    """Centers (number, P) by k-means on a sample; a center without points stays where it was."""
    generator = torch.Generator().manual_seed(seed)
    sample = points[torch.randperm(len(points), generator=generator)[: _PER_LIST * number].to(points.device)]
    centers = sample[:number].clone()
    for _ in range(_ROUNDS):
        nearest = TorchIndex(centers).query(sample, 1)[1][:, 0]
        sums = torch.zeros_like(centers, dtype=torch.float64).index_add_(0, nearest, sample.double())
        counts = nearest.bincount(minlength=number)[:, None]
        centers = torch.where(counts > 0, (sums / counts.clamp_min(1)).to(centers.dtype), centers)
    return centers
