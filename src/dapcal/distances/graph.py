"""Approximate neighbours by walking a graph from point to point: a few hundred comparisons a query, whatever the size.

faiss builds and walks the graph; what is stored are its numbers, checked one by one when they are read, and not the
bytes of a faiss file, which would be believed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dapcal.distances.direct import nearest_among
from dapcal.distances.faiss_search import needed
from dapcal.distances.neighbors import TorchIndex
from dapcal.distances.quality import UNMEASURED, SearchQuality, reference
from dapcal.storing import Stores

_FEWEST = 16  # points that a walk keeps in view
_MOST = 1024


@dataclass(frozen=True)
class HNSW:
    """Recipe: hierarchical navigable small worlds (Malkov and Yashunin 2018), by faiss on a CPU (extra `fast`).

    Args:
        links: of a point to others, in each direction of the graph.
        recall: share of exact answers that is wanted; walks look at more points until a sample reaches it, or 1024.
        breadth: points that a walk keeps in view, in place of `recall`.
        seed: of the sample.
    """

    links: int = 16
    recall: float = 0.95
    breadth: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.links < 2:
            raise ValueError(f"Expected `links` >= 2, got {self.links}")
        if not 0 < self.recall <= 1:
            raise ValueError(f"Expected `recall` above 0 and at most 1, got {self.recall}")
        if self.breadth is not None and self.breadth < 1:
            raise ValueError(f"Expected `breadth` >= 1 or None, got {self.breadth}")

    def __call__(self, points: Tensor) -> NeighborGraph:
        """Build the graph, and find how far to look around."""
        points = TorchIndex(points).points.float().cpu().contiguous()
        faiss = needed("HNSW")
        built = faiss.IndexHNSWFlat(points.shape[1], self.links)
        built.hnsw.efConstruction = max(40, 2 * self.links)
        before = faiss.omp_get_max_threads()
        faiss.omp_set_num_threads(1)  # by several, the graph would not be the same each time
        try:
            built.add(points.numpy())
        finally:
            faiss.omp_set_num_threads(before)
        parts = [torch.from_numpy(faiss.vector_to_array(part).astype("int64")) for part in _parts(built.hnsw)]
        levels, starts, links = parts
        entry, breadth = int(built.hnsw.entry_point), self.breadth or _FEWEST
        graph = NeighborGraph(points, levels, starts, links, entry, self.links, breadth, UNMEASURED)
        exact = reference(points, self.seed)
        graph = replace(graph, quality=exact.quality(graph))
        while self.breadth is None and graph.quality.recall < self.recall and graph.breadth < _MOST:
            graph = replace(graph, breadth=2 * graph.breadth)
            graph = replace(graph, quality=exact.quality(graph))
        return graph


@dataclass(frozen=True, eq=False)
class NeighborGraph:
    """The nearest points that a walk finds; their distances are computed directly.

    Memory: faiss has a copy of the points beside them.

    Attributes:
        points: training points (T, P), of float32 in main memory.
        levels: on how many levels each is, (T,).
        starts: where its links start and end, (T + 1,).
        links: to other points, level by level; −1 where there is none.
        entry: where walks start.
        width: links of a point to others, on a level above the lowest.
        breadth: points that a walk keeps in view.
        quality: as measured at fitting.
    """

    stores = Stores()

    points: Tensor
    levels: Tensor
    starts: Tensor
    links: Tensor
    entry: int
    width: int
    breadth: int
    quality: SearchQuality

    def __post_init__(self) -> None:
        total = len(self.points)
        fine = self.points.ndim == 2 and self.points.dtype == torch.float32 and total > 0 and self.width >= 2
        fine = fine and all(t.dtype == torch.int64 and t.ndim == 1 for t in (self.levels, self.starts, self.links))
        fine = fine and self.levels.shape == (total,) and self.starts.shape == (total + 1,) and self.breadth >= 1
        if not fine or not 0 <= self.entry < total or not self._is_graph():
            raise ValueError("Expected a graph over the training points, got another one; fit the index again")

    def _is_graph(self) -> bool:
        """Whether every walk stays inside: as many links as a point's levels have, to points that are on that level."""
        levels, highest = self.levels, int(self.levels.max())
        if int(levels.min()) < 1 or highest > 64 or int(levels[self.entry]) != highest:
            return False
        counts = self.width * (levels + 1)  # the lowest level has twice as many
        if not torch.equal(self.starts, torch.cat([counts.new_zeros(1), counts.cumsum(0)])):
            return False
        if int(self.starts[-1]) != len(self.links):
            return False
        if int(self.links.min()) < -1 or int(self.links.max()) >= len(levels):
            return False
        within = torch.arange(len(self.links)) - self.starts[:-1].repeat_interleave(counts)
        level = (within // self.width - 1).clamp_min(0)
        return bool(((self.links < 0) | (levels[self.links.clamp_min(0)] > level)).all())

    @property
    def note(self) -> str:
        """What it is and how good, in words."""
        return f"approximate neighbours by a graph, {self.breadth} points in view: {self.quality}"

    @cached_property
    def _walked(self) -> Any:
        """The graph as faiss walks it."""
        faiss = needed("HNSW")
        index = faiss.IndexHNSWFlat(self.points.shape[1], self.width)
        index.storage.add(self.points.numpy())
        index.ntotal = len(self.points)
        for part, numbers in zip(_parts(index.hnsw), (self.levels, self.starts, self.links), strict=True):
            faiss.copy_array_to_vector(numbers.numpy().astype(faiss.vector_to_array(part).dtype), part)
        index.hnsw.entry_point, index.hnsw.max_level = self.entry, int(self.levels.max()) - 1
        return index

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """What is copied or sent to another process: not what faiss holds."""
        parts = (self.points, self.levels, self.starts, self.links, self.entry, self.width, self.breadth, self.quality)
        return type(self), parts

    def query(self, points: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
        """Distances (N, k), ascending, and indices (N, k); walks that find fewer than k points look at all of them."""
        total = len(self.points)
        if not 1 <= k <= total:
            raise ValueError(f"Expected `k` between 1 and {total} (training inputs), got {k}")
        queries = points.detach().to(self.points).contiguous()
        options = needed("HNSW").SearchParametersHNSW(efSearch=min(max(self.breadth, 2 * k), max(total, 2)))
        found = torch.from_numpy(self._walked.search(queries.numpy(), min(total, k + 2), params=options)[1])
        distances, indices = nearest_among(self.points, queries, found.sort(1).values, k)
        lost = distances[:, -1].isinf().nonzero().flatten()
        if len(lost):
            distances[lost], indices[lost] = TorchIndex(self.points).query(queries[lost], k)
        return distances.to(points.device), indices.to(points.device)


def _parts(hnsw: Any) -> tuple[Any, Any, Any]:
    return hnsw.levels, hnsw.offsets, hnsw.neighbors
