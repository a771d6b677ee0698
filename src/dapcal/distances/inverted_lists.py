"""Approximate neighbours in lists around centers: only the lists whose centers are nearest to a query are searched.

Points lie in the order of their lists, so that a list is one piece of memory, or of a file that is mapped into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from dapcal.distances.lists import Lists, in_lists
from dapcal.distances.neighbors import TorchIndex
from dapcal.distances.quality import UNMEASURED, Judged, SearchQuality, reference
from dapcal.storing import Stores

Index = TypeVar("Index", bound=Judged)

_FEWEST_PROBES = 4
_MORE = 2  # candidates beside those wanted, of which products may mistake the order


@dataclass(frozen=True)
class IVF:
    """Recipe: lists around centers found by k-means (Jégou et al. 2011), searched in torch on any device.

    Args:
        lists: number of lists; by default about the square root of the number of points.
        recall: share of exact answers that is wanted; lists are searched until a sample of training points reaches it.
        probes: lists that are searched for a query, in place of `recall`.
        seed: of the sample and of k-means.
        memory: bytes that a search may take beside points and queries, about.
    """

    lists: int | None = None
    recall: float = 0.95
    probes: int | None = None
    seed: int = 0
    memory: int = 2**28

    def __post_init__(self) -> None:
        check_lists(self.lists, self.recall, self.probes)

    def __call__(self, points: Tensor) -> InvertedLists:
        """Fit the lists, and how many are searched."""
        points = TorchIndex(points).points  # checked, and of a type that can be squared
        lists = in_lists(points, self.lists, self.seed, self.memory)
        return self.probed(InvertedLists(points[lists.order], lists, 1, UNMEASURED, self.memory), points)

    def probed(self, index: InvertedLists, points: Tensor) -> InvertedLists:
        """The index with as many probes as the recall takes, measured on training points."""
        exact = reference(points, self.seed)

        def measured(probes: int) -> InvertedLists:
            own = replace(index, probes=probes)
            return replace(own, quality=exact.quality(own))

        return first_with(self.recall, self.probes, len(index.lists.centers), measured)


@dataclass(frozen=True, eq=False)
class InvertedLists:
    """The nearest among the points of the lists that are searched; their distances are computed directly.

    Attributes:
        points: training points in the order of their lists, (T, P).
        lists: where they lie.
        probes: lists that are searched for a query.
        quality: as measured at fitting.
        memory: bytes that a search may take beside points and queries, about.
    """

    stores = Stores(in_file=("points",))

    points: Tensor
    lists: Lists
    probes: int
    quality: SearchQuality
    memory: int

    def __post_init__(self) -> None:
        check_places(self.points, self.lists, self.probes)

    @property
    def note(self) -> str:
        """What it is and how good, in words."""
        return f"approximate neighbours, {self.probes} of {len(self.lists.centers)} lists searched: {self.quality}"

    def query(self, points: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
        """Distances (N, k), ascending, and indices (N, k); at least as many lists are searched as hold k points."""
        total = len(self.points)
        if not 1 <= k <= total:
            raise ValueError(f"Expected `k` between 1 and {total} (training inputs), got {k}")
        points = points.detach().to(self.points)
        probes = max(self.probes, self.lists.enough(k))
        rows = max(1, self.memory // (4 * 8 * (probes * (k + _MORE) + 2 * self.points.shape[1])))
        found = [self._query_block(block, k, probes) for block in points.split(rows)]
        return torch.cat([d for d, _ in found]), torch.cat([i for _, i in found])

    def _query_block(self, queries: Tensor, k: int, probes: int) -> tuple[Tensor, Tensor]:
        kept = min(k + _MORE, len(self.points))
        values = queries.new_full((len(queries) * probes, kept), torch.inf)
        places = torch.full_like(values, -1, dtype=torch.long)
        searched = self.lists.searched(queries, probes).flatten()
        pairs_by_list = searched.argsort(stable=True)
        ends = searched.bincount(minlength=len(self.lists.centers)).cumsum(0).tolist()
        for number, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
            start, stop = self.lists.bounds[number : number + 2]
            if first < last and start < stop:
                pairs = pairs_by_list[first:last]
                center = self.lists.centers[number]
                squared = _squared(queries[pairs // probes] - center, self.points[start:stop] - center)
                best, where = squared.topk(min(kept, stop - start), 1, largest=False)
                values[pairs, : best.shape[1]], places[pairs, : best.shape[1]] = best, where + start
        slots = values.view(len(queries), -1).topk(kept, 1, largest=False).indices
        return self.lists.nearest(self.points, queries, places.view(len(queries), -1).gather(1, slots), k)


def check_lists(lists: int | None, recall: float, probes: int | None) -> None:
    """Refuse what cannot be asked of lists."""
    if lists is not None and lists < 1:
        raise ValueError(f"Expected `lists` >= 1 or None, got {lists}")
    if not 0 < recall <= 1:
        raise ValueError(f"Expected `recall` above 0 and at most 1, got {recall}")
    if probes is not None and probes < 1:
        raise ValueError(f"Expected `probes` >= 1 or None, got {probes}")


def check_places(points: Tensor, lists: Lists, probes: int) -> None:
    """Refuse points that are not those of the lists, as a file may hold them."""
    fine = points.ndim == 2 and points.shape == (len(lists.order), lists.centers.shape[-1])
    if not fine or not points.is_floating_point() or points.dtype != lists.centers.dtype:
        raise ValueError(f"Expected a training point for every place in the lists, got shape {tuple(points.shape)}")
    if not 1 <= probes <= len(lists.centers):
        raise ValueError(f"Expected `probes` between 1 and {len(lists.centers)} (lists), got {probes}")


def first_with(recall: float, probes: int | None, lists: int, measured: Callable[[int], Index]) -> Index:
    """The first index that is good enough: with the probes that were asked for, or twice as many each time."""
    *tried, last = _tried(probes, lists)
    for number in tried:
        index = measured(number)
        if index.quality.recall >= recall:
            return index
    return measured(last)


def _tried(probes: int | None, lists: int) -> Iterator[int]:
    """How many lists to search: as asked, or twice as many each time."""
    if probes is not None:
        yield min(probes, lists)
        return
    number = min(_FEWEST_PROBES, lists)
    while number < lists:
        yield number
        number *= 2
    yield lists


def _squared(queries: Tensor, points: Tensor) -> Tensor:
    """Squared distances (N, points) by products."""
    return torch.addmm((points**2).sum(1)[None], queries, points.T, alpha=-2).add_((queries**2).sum(1, keepdim=True))
