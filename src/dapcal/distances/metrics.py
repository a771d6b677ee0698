"""Pre-distances from points to a fixed training set: nearest neighbours, Hausdorff, maximum mean discrepancy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dapcal.distances.inverted_lists import IVF
from dapcal.distances.neighbors import TorchIndex
from dapcal.distances.projectors import median_distance
from dapcal.distances.spread import neighbors
from dapcal.storing import Stores
from dapcal.types import NeighborIndex

MOST_EXACT = 1_000_000  # points; with more of 64 numbers two cores answer fewer than a thousand exact queries a second


def nearest(
    points: Tensor, *, k: int = 1, over: str = "max", index: Callable[[Tensor], NeighborIndex] | None = None
) -> NearestNeighbor:
    """Distance to the k-th nearest training point; a set counts by its farthest point or by the sum.

    Args:
        points: training points (T, P).
        k: which neighbour. For k > 1 training points are at zero only if the radius covers them.
        over: "max" (the paper) or "sum" over the points of a set.
        index: how neighbours are found: exactly by `TorchIndex`; approximately by `IVF()`, `HNSW()`, `OnDisk(path)` or
            `ProductQuantised()`; among some of the points by `Coreset(size)`. By default exactly up to `MOST_EXACT`
            points, and by `IVF()` beyond.
    """
    if over not in ("max", "sum"):
        raise ValueError(f"Expected `over` as 'max' or 'sum', got {over!r}")
    if not 1 <= k <= len(points):
        raise ValueError(f"Expected `k` between 1 and {len(points)} (training inputs), got {k}")
    if index is None:
        index = TorchIndex if len(points) <= MOST_EXACT else IVF()
    return NearestNeighbor(index(points), k, over)


def hausdorff(points: Tensor, *, memory: int = 2**28) -> Hausdorff:
    """Symmetric Hausdorff distance: the nearest neighbour for one input, for a set also the training points' way."""
    return Hausdorff(TorchIndex(points, memory))


def mmd(points: Tensor, *, length_scale: float | None = None, seed: int = 0, memory: int = 2**28) -> MMD:
    """Biased maximum mean discrepancy with a Gaussian kernel between [ξ, training set] and the training set.

    Args:
        points: training points (T, P).
        length_scale: of the kernel; by default the median distance between training points.
        seed: of the pairs that the median is taken over.
        memory: bytes for one block of kernel values, about.
    """
    length = length_scale
    if length is None:
        length = median_distance(points, torch.Generator().manual_seed(seed))
    sums = MMD(points, length, 0.0, memory).kernel_sums(points)
    return MMD(points, length, float(sums.sum()) / len(points) ** 2, memory)


@dataclass(frozen=True, eq=False)
class NearestNeighbor:
    """d0(x*) = ‖z* − z_(k)‖, and for sets max or Σ over their points (paper, eq. d0_nn)."""

    stores = Stores()

    index: NeighborIndex
    k: int
    over: str

    def __call__(self, points: Tensor) -> Tensor:
        """(N,)."""
        return neighbors(self.index, points, self.k)[0][:, -1]

    def joint(self, points: Tensor) -> Tensor:
        """Scalar."""
        return self.combine(self(points))

    def combine(self, distances: Tensor) -> Tensor:
        """Max or sum over the set."""
        return distances.max() if self.over == "max" else distances.sum()


@dataclass(frozen=True, eq=False)
class Hausdorff:
    """max(max_ξ min_x ‖ξ − x‖, max_x min_ξ ‖ξ − x‖). With ξ = [x*, training set] the second term vanishes."""

    stores = Stores()

    index: TorchIndex

    def __call__(self, points: Tensor) -> Tensor:
        """(N,)."""
        return self.index.query(points, 1)[0][:, 0]

    def joint(self, points: Tensor) -> Tensor:
        """Scalar, symmetric in the set and the training points."""
        there = self(points).max()
        back = TorchIndex(points.to(self.index.points), self.index.memory).query(self.index.points, 1)[0].max()
        return torch.maximum(there, back)


@dataclass(frozen=True, eq=False)
class MMD:
    """‖μ[ξ, x] − μ[x]‖ in the kernel's space; zero for ξ = x as a whole, not for each training input alone.

    For m new points among N training points the difference of means is m/(N + m) · (μ[ξ] − μ[x]).
    """

    stores = Stores(in_file=("points",))

    points: Tensor
    length_scale: float
    mean_kernel: float  # mean of k over all pairs of training points
    memory: int

    def __call__(self, points: Tensor) -> Tensor:
        """1/(N + 1) · √(1 − 2 mean_i k(x_i, x*) + mean k), (N,)."""
        n = len(self.points)
        squared = 1 - 2 * self.kernel_sums(points) / n + self.mean_kernel
        return (squared.clamp_min(0).sqrt() / (n + 1)).to(points.dtype)

    def joint(self, points: Tensor) -> Tensor:
        """Scalar."""
        n, m = len(self.points), len(points)
        own = MMD(points, self.length_scale, 0.0, self.memory).kernel_sums(points).sum() / m**2
        squared = own - 2 * self.kernel_sums(points).sum() / (n * m) + self.mean_kernel
        return (m / (n + m) * squared.clamp_min(0).sqrt()).to(points.dtype)

    def kernel_sums(self, points: Tensor) -> Tensor:
        """Σ_i exp(−‖x_i − z‖²/(2ℓ²)), (N,) in float64, by blocks."""
        columns = max(1, self.memory // (4 * 8 * max(64, self.points.shape[1])))
        rows = max(1, self.memory // (4 * 8 * min(columns, len(self.points))))
        sums = torch.zeros(len(points), dtype=torch.float64, device=self.points.device)
        for training in self.points.split(columns):
            for block, part in zip(points.to(self.points).split(rows), sums.split(rows), strict=True):
                squared = torch.cdist(block.double(), training.double()) ** 2
                part += torch.exp(-squared / (2 * self.length_scale**2)).sum(1)
        return sums
