"""Exact nearest-neighbour search in chunks: memory stays bounded whatever the number of inputs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dapcal.storing import Stores

_ROUNDOFF = {
    "highest": 2**-24,
    "high": 2**-11,
    "medium": 2**-8,
}  # of float32 matrix products, by torch setting


@dataclass(frozen=True, eq=False)
class TorchIndex:
    """Brute-force search by matrix products, on the device of the points.

    ‖q − t‖² = ‖q‖² + ‖t‖² − 2 q·t is fast but loses digits (identical points come out 0.016 apart). So a few more
    candidates than needed are kept, their distances computed directly, and the answer accepted only if the error
    bound of the product proves that no other point can be nearer; the queries that fail (duplicates, far-off
    clusters) are searched again in float64.

    Args:
        points: training points (T, P).
        memory: bytes that a search may take beside points and queries, about.
    """

    stores = Stores()

    points: Tensor
    memory: int = 2**28
    _center: Tensor = field(init=False, repr=False)
    _reach: float = field(init=False, repr=False)  # largest squared distance of a point from the center

    def __post_init__(self) -> None:
        if self.points.dtype == torch.float16:  # squares overflow
            object.__setattr__(self, "points", self.points.float())
        if self.points.ndim != 2 or not len(self.points):
            raise ValueError(f"Expected training points (T, P), got shape {tuple(self.points.shape)}")
        sums = torch.stack([block.double().sum(0) for block in self.points.split(self._block)])
        center = (sums.sum(0) / len(self.points)).to(self.points.dtype)
        reach = max(float(((block - center) ** 2).sum(1).max()) for block in self.points.split(self._block))
        object.__setattr__(self, "_center", center)
        object.__setattr__(self, "_reach", reach)

    def query(self, points: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
        """Distances (N, k), ascending, and indices (N, k)."""
        total = len(self.points)
        if not 1 <= k <= total:
            raise ValueError(f"Expected `k` between 1 and {total} (training inputs), got {k}")
        if points.ndim != 2 or points.shape[1] != self.points.shape[1]:
            raise ValueError(f"Expected points (N, {self.points.shape[1]}), got {tuple(points.shape)}")
        points = points.to(self.points)
        found = [self._query_block(block, k) for block in points.split(self._block)]
        return torch.cat([d for d, _ in found]), torch.cat([i for _, i in found])

    @property
    def _block(self) -> int:
        """Rows of points or queries whose copy in float64 takes a quarter of the memory."""
        return max(1, self.memory // (4 * 8 * max(64, self.points.shape[1])))

    def _query_block(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        total = len(self.points)
        kept = min(total, k + 8)
        approximate, candidates = self._candidates(queries, kept, self.points.dtype)
        distances, indices = self._rerank(queries, candidates, k)
        if kept == total:
            return distances, indices
        doubtful = self._doubtful(queries, approximate, distances, self._roundoff).nonzero().flatten()
        if len(doubtful) and self.points.dtype != torch.float64:
            approximate, candidates = self._candidates(queries[doubtful], kept, torch.float64)
            distances[doubtful], indices[doubtful] = self._rerank(queries[doubtful], candidates, k)
            still = self._doubtful(queries[doubtful], approximate, distances[doubtful], 2**-53)
            doubtful = doubtful[still]
        for row in doubtful.tolist():  # float64 cannot tell either: all distances directly
            distances[row], indices[row] = self._direct(queries[row], k)
        return distances, indices

    def _direct(self, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
        exact = torch.cat([(query - block).norm(dim=1) for block in self.points.split(self._block)])
        values, order = exact.sort(stable=True)
        return values[:k], order[:k]

    def _doubtful(self, queries: Tensor, approximate: Tensor, distances: Tensor, roundoff: float) -> Tensor:
        scale = ((queries - self._center) ** 2).sum(1) + self._reach
        error = 4 * roundoff * queries.shape[1] ** 0.5 * scale
        # ties at the end of the candidates are not in doubt: a point left out would be no nearer, but for rounding
        slack = 1 - 4 * torch.finfo(distances.dtype).eps
        return ~((approximate[:, -1] - error).clamp_min(0) >= slack * distances[:, -1] ** 2)

    @property
    def _roundoff(self) -> float:
        if self.points.dtype == torch.float32:
            return _ROUNDOFF[torch.get_float32_matmul_precision()]
        return torch.finfo(self.points.dtype).eps

    def _candidates(self, queries: Tensor, kept: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The `kept` smallest approximate squared distances (N, kept) and their indices, over blocks of columns."""
        queries = queries.to(dtype) - self._center.to(dtype)
        squares = (queries**2).sum(1, keepdim=True)
        best = torch.full((len(queries), kept), torch.inf, dtype=dtype, device=queries.device)
        where = torch.zeros_like(best, dtype=torch.long)
        for start in range(0, len(self.points), self._block):
            block = self.points[start : start + self._block].to(dtype) - self._center.to(dtype)
            norms = (block**2).sum(1)
            step = max(1, self.memory // (4 * 8 * len(block)))
            for row in range(0, len(queries), step):
                rows = slice(row, row + step)
                product = torch.addmm(norms[None], queries[rows], block.T, alpha=-2).add_(squares[rows])
                values, index = product.topk(min(kept, len(block)), 1, largest=False)
                best[rows], order = torch.cat([best[rows], values], 1).topk(kept, 1, largest=False)
                where[rows] = torch.cat([where[rows], index + start], 1).gather(1, order)
        return best, where

    def _rerank(self, queries: Tensor, candidates: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Direct distances to the candidates; the k nearest, ties by index."""
        candidates = candidates.sort(1).values
        exact = torch.stack([(queries - self.points[c]).norm(dim=1) for c in candidates.T], 1)
        order = exact.argsort(dim=1, stable=True)[:, :k]
        return exact.gather(1, order), candidates.gather(1, order)
