"""Exact nearest-neighbour search in chunks: memory stays bounded whatever the number of inputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from dapcal.distances.direct import distances_of_pairs, nearest_among, nearest_of_pairs
from dapcal.distances.faiss_search import is_few, searched, suits
from dapcal.distances.principal import LEAST_QUERIES, WORTH_BUILDING, Principal, principal
from dapcal.distances.products import GROUP, MANY, Candidates, Products, roundoff_of_sums
from dapcal.in_file import checked
from dapcal.storing import Stores


@dataclass(frozen=True, eq=False)
class TorchIndex:
    """Brute-force search by matrix products, on the device of the points; faiss answers single queries on a CPU.

    Products find candidates, their distances are computed directly, and the answer is accepted only if the error
    bound of the products proves that any other point is farther. The queries that fail are searched with more
    candidates, and those that fail again (many duplicates, far-off clusters) among all points that float64 cannot rule
    out. So answers are those of all distances computed directly, to the last bit, ties by index, whatever finds them.
    Of many queries among wide points that vary in few directions, nearly all are answered by few numbers a point
    (`dapcal.distances.principal`).

    Args:
        points: training points (T, P).
        memory: bytes that a search may take beside points and queries, about. Kept between searches: T numbers, and
            copies of the points, centred, as products take them, and as few numbers, if these take at most a quarter of
            it each.
    """

    stores = Stores(in_file=("points",))

    points: Tensor
    memory: int = 2**28

    def __post_init__(self) -> None:
        if self.points.dtype == torch.float16:  # squares overflow
            object.__setattr__(self, "points", self.points.float())
        if self.points.ndim != 2 or not len(self.points):
            raise ValueError(f"Expected training points (T, P), got shape {tuple(self.points.shape)}")

    def __reduce__(self) -> tuple[type, tuple[Tensor, int]]:
        """What is copied or sent to another process: not what is kept between searches."""
        return type(self), (self.points, self.memory)

    def query(self, points: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
        """Distances (N, k), ascending, and indices (N, k)."""
        total = len(self.points)
        if not 1 <= k <= total:
            raise ValueError(f"Expected `k` between 1 and {total} (training inputs), got {k}")
        if points.ndim != 2 or points.shape[1] != self.points.shape[1]:
            raise ValueError(f"Expected points (N, {self.points.shape[1]}), got {tuple(points.shape)}")
        own = checked(self.points)  # every time, as views of them are kept: their file may have been written to
        points = points.detach().to(own)
        if len(points) <= self._products.block:
            return self._query_block(points, k)
        found = [self._query_block(block, k) for block in points.split(self._products.block)]
        return torch.cat([d for d, _ in found]), torch.cat([i for _, i in found])

    @cached_property
    def _products(self) -> Products:
        return Products(checked(self.points), self.memory)

    @cached_property
    def _array(self) -> np.ndarray | None:
        """The points as faiss takes them, not copied; None where it is not there or cannot."""
        return self.points.detach().numpy() if suits(self.points) else None

    def _pays(self, queries: int) -> bool:
        """Whether so many queries, with those before, are worth the time that points as few numbers take to be made."""
        self._asked[0] += queries
        return self._asked[0] >= WORTH_BUILDING

    @cached_property
    def _asked(self) -> list[int]:
        """How many queries have been searched for in groups, alone in its list; threads may miss some."""
        return [0]

    @cached_property
    def _principal(self) -> Principal | None:
        return principal(checked(self.points), self.memory)

    def _query_block(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        distances, indices, settled = self._first(queries, k)
        if settled.all():
            return distances, indices
        rows = (~settled).nonzero().flatten()
        more = self._products.candidates(queries[rows], k + 8, k)
        distances[rows], indices[rows], settled = self._settle(queries[rows], more, k)
        rows = rows[~settled]
        if len(rows):
            distances[rows], indices[rows] = self._direct(queries[rows], distances[rows, -1], k)
        return distances, indices

    def _first(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """The k nearest, as it seems, and for which queries any other point is farther, (N,)."""
        if self._array is not None and k < len(self.points) and is_few(self._array, queries):
            squared, indices = searched(self._array, queries.contiguous(), k + 1, 1)
            off = roundoff_of_sums(self.points.shape[1]) * 2**-24  # these distances are computed directly
            found = indices[:, :k].sort(1).values if k > 1 else indices[:, :1]
            return self._settle(queries, Candidates(found, squared[:, k] * (1 - off)), k)
        if k <= MANY and len(queries) >= LEAST_QUERIES and self._pays(len(queries)) and self._principal is not None:
            return self._principal.nearest(self.points, queries, k, self._limit, self.memory)
        return self._settle(queries, self._products.candidates(queries, k, k), k)

    def _settle(self, queries: Tensor, candidates: Candidates, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """The k nearest candidates, ties by index, and for which queries any other point is farther, (N,)."""
        distances, indices = self._among(queries, candidates.indices, k)
        return distances, indices, self._products.are_beyond(candidates, self._limit(distances[:, -1]))

    def _among(self, queries: Tensor, candidates: Tensor, k: int) -> tuple[Tensor, Tensor]:
        padded = len(self.points) % GROUP > 0  # the last group may be short
        return nearest_among(self.points, queries, candidates, k, padded, self.memory)

    def _limit(self, distances: Tensor) -> Tensor:
        """Squared distances, and what rounding may have taken from the direct distance of another point."""
        off = roundoff_of_sums(self.points.shape[1]) * torch.finfo(distances.dtype).eps
        return distances**2 * (1 + off)

    def _direct(self, queries: Tensor, farthest: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k nearest of all points that may be as near as `farthest` (N,), compared directly."""
        row = queries.new_empty(0, dtype=torch.long)
        column, distance = row, queries.new_empty(0)
        for rows, columns in self._products.within(queries, self._limit(farthest)):
            direct = distances_of_pairs(self.points, queries, rows, columns, self.memory)
            row, column, distance = torch.cat([row, rows]), torch.cat([column, columns]), torch.cat([distance, direct])
            row, column, distance = nearest_of_pairs(row, column, distance, k)
        return distance.view(-1, k), column.view(-1, k)
