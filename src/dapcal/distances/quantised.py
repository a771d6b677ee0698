"""Approximate neighbours by codes of a few bytes a point: what is searched is small, and points may stay on disk.

A code says in pieces where a point lies from the center of its list (product quantisation). Codes find candidates,
whose points are then compared directly. faiss scans the codes; what is stored are tensors, and not the bytes of a faiss
file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dapcal.distances.faiss_search import needed
from dapcal.distances.inverted_lists import check_lists, check_places, first_with
from dapcal.distances.lists import Lists, in_lists
from dapcal.distances.neighbors import TorchIndex
from dapcal.distances.quality import UNMEASURED, SearchQuality, reference
from dapcal.storing import Stores

_VALUES = 256  # of a byte
_SAMPLE = 256 * _VALUES  # points that codes are fitted to, at most


@dataclass(frozen=True)
class ProductQuantised:
    """Recipe: lists around centers, and in them codes of `pieces` bytes (Jégou et al. 2011), by faiss (extra `fast`).

    Args:
        pieces: bytes of a point's code; by default one for four numbers.
        candidates: points that are compared directly, for every neighbour that is wanted.
        lists: number of lists; by default about the square root of the number of points.
        recall: share of exact answers that is wanted; lists are searched until a sample of training points reaches it,
            or all are.
        probes: lists that are searched for a query, in place of `recall`.
        seed: of the sample and of k-means.
    """

    pieces: int | None = None
    candidates: int = 64
    lists: int | None = None
    recall: float = 0.95
    probes: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_lists(self.lists, self.recall, self.probes)
        if self.pieces is not None and self.pieces < 1:
            raise ValueError(f"Expected `pieces` >= 1 or None, got {self.pieces}")
        if self.candidates < 1:
            raise ValueError(f"Expected `candidates` >= 1, got {self.candidates}")

    def __call__(self, points: Tensor) -> QuantisedLists:
        """Fit lists and codes, and how many lists are searched."""
        points = TorchIndex(points).points.float().cpu()
        if len(points) < _VALUES:
            raise ValueError(
                f"Expected at least {_VALUES} training points for codes, got {len(points)}; use TorchIndex"
            )
        faiss, width = needed("ProductQuantised"), points.shape[1]
        pieces = min(width, self.pieces or max(1, width // 4))
        lists = in_lists(points, self.lists, self.seed, 2**28)
        placed = points[lists.order]
        each = -(-width // pieces)
        quantizer = faiss.ProductQuantizer(pieces * each, pieces, 8)
        generator = torch.Generator().manual_seed(self.seed)
        rows = torch.randperm(len(points), generator=generator)[:_SAMPLE]
        quantizer.cp.min_points_per_centroid = 1  # few points are not worth a warning on standard error
        quantizer.train(_offsets(placed, lists, rows, pieces * each))
        codes = [
            quantizer.compute_codes(_offsets(placed, lists, part, pieces * each))
            for part in torch.arange(len(points)).split(_SAMPLE)
        ]
        books = torch.from_numpy(faiss.vector_to_array(quantizer.centroids).reshape(pieces, _VALUES, each).copy())
        index = QuantisedLists(
            placed, lists, books, torch.from_numpy(np.concatenate(codes)), 1, self.candidates, UNMEASURED
        )
        exact = reference(points, self.seed)

        def measured(probes: int) -> QuantisedLists:
            own = replace(index, probes=probes)
            return replace(own, quality=exact.quality(own))

        return first_with(self.recall, self.probes, len(lists.centers), measured)


@dataclass(frozen=True, eq=False)
class QuantisedLists:
    """The nearest among the points whose codes are nearest; their distances are computed directly.

    Attributes:
        points: training points in the order of their lists, (T, P), of float32 in main memory or mapped into it.
        lists: where they lie.
        books: what the values of each piece of a code stand for, (pieces, 256, numbers).
        codes: of the points, (T, pieces).
        probes: lists that are searched for a query.
        candidates: points that are compared directly, for every neighbour that is wanted.
        quality: as measured at fitting.
    """

    stores = Stores(in_file=("points",))

    points: Tensor
    lists: Lists
    books: Tensor
    codes: Tensor
    probes: int
    candidates: int
    quality: SearchQuality

    def __post_init__(self) -> None:
        check_places(self.points, self.lists, self.probes)
        pieces, each = self.books.shape[0], self.books.shape[-1]
        fine = self.books.shape == (pieces, _VALUES, each) and pieces * each >= self.points.shape[1] and pieces > 0
        fine = fine and self.codes.shape == (len(self.points), pieces) and self.codes.dtype == torch.uint8
        if not fine or self.points.dtype != torch.float32 or self.books.dtype != torch.float32 or self.candidates < 1:
            raise ValueError("Expected a code for every training point, got others; fit the index again")

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """What is copied or sent to another process: not what faiss holds."""
        parts = self.points, self.lists, self.books, self.codes, self.probes, self.candidates, self.quality
        return type(self), parts

    @property
    def note(self) -> str:
        """What it is and how good, in words."""
        return (
            f"approximate neighbours by codes of {len(self.books)} bytes, {self.probes} of {len(self.lists.centers)} "
            f"lists searched: {self.quality}"
        )

    @cached_property
    def _scanned(self) -> Any:
        """Centers and codes as faiss scans them, a copy of T × pieces bytes."""
        faiss = needed("ProductQuantised")
        pieces, _, each = self.books.shape
        coarse = faiss.IndexFlatL2(pieces * each)
        coarse.add(_widened(self.lists.centers, pieces * each).numpy())
        index = faiss.IndexIVFPQ(coarse, pieces * each, len(self.lists.centers), pieces, 8)
        faiss.copy_array_to_vector(self.books.numpy().ravel(), index.pq.centroids)
        index.is_trained = True
        index.precompute_table()
        places, codes = np.arange(len(self.points)), self.codes.numpy()
        for number, (start, stop) in enumerate(zip(self.lists.bounds, self.lists.bounds[1:], strict=False)):
            own = places[start:stop], codes[start:stop]
            index.invlists.add_entries(number, stop - start, *map(faiss.swig_ptr, own))
        index.ntotal = len(self.points)
        return index

    def query(self, points: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
        """Distances (N, k), ascending, and indices (N, k); at least as many lists are searched as hold k points."""
        total = len(self.points)
        if not 1 <= k <= total:
            raise ValueError(f"Expected `k` between 1 and {total} (training inputs), got {k}")
        queries = points.detach().to(self.points)
        options = needed("ProductQuantised").SearchParametersIVF(nprobe=max(self.probes, self.lists.enough(k)))
        widened = _widened(queries, self._scanned.d).numpy()
        places = torch.from_numpy(self._scanned.search(widened, min(total, k * self.candidates), params=options)[1])
        distances, indices = self.lists.nearest(self.points, queries, places, k)
        return distances.to(points.device), indices.to(points.device)


def _offsets(placed: Tensor, lists: Lists, rows: Tensor, width: int) -> np.ndarray:
    """Some points as seen from the centers of their lists, (n, width)."""
    center = torch.bucketize(rows, lists.starts[1:], right=True)
    return _widened(placed[rows] - lists.centers[center], width).numpy()


def _widened(points: Tensor, width: int) -> Tensor:
    """Points with zeros at the end, so that pieces divide them."""
    return pad(points, (0, width - points.shape[1])).contiguous()
