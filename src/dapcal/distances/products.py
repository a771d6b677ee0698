"""Candidates for nearest neighbours by matrix products, with a proven bound on everything that is left out.

‖q − t‖² = ‖q‖² + ‖t‖² − 2 q·t is fast but loses digits (identical points come out 0.016 apart). Of every `GROUP` points
that follow each other only the smallest product is kept, which costs a fraction of sorting all of them; the members of
the best groups are candidates, and no other point is nearer than the next best group, up to a known error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.distances.direct import small_steps_pay
from dapcal.distances.multiplying import multiplied, roundoff

GROUP = 8  # points whose smallest product stands for all
MANY = 16  # neighbours up to which the members of their groups are few
_DIRECTLY = 2  # numbers compared directly take as long as one product takes in the choice of the smallest, about
_MINIMA = 16  # of groups, whose smallest stands for all in turn: a run
_WORTH_RUNS = 4 * _MINIMA  # groups for each that is looked for; fewer are looked at one by one
_ROWS, _COLUMNS = 512, 512  # queries and points of a thread's product: 1 MiB, which stays in the cache
_ROWS_ELSEWHERE = 4096  # queries of a product on other devices, which want few and large ones
_MINIMA_AT_ONCE = 2**21  # numbers: 8 MiB, which stay in the cache, or as many as are worth looking at in runs
_ONCE = 2**20  # numbers of points that are looked at once: few enough for the memory of one step to serve the next
_FAR = 0.5  # points are centred first where that takes this share of their squared lengths, or lengths overflow
_A_LITTLE_MORE = 1 + 2**-10  # than lengths that are rounded


class Candidates(NamedTuple):
    """Points that may be nearest, and how near any other can be.

    Attributes:
        indices: of points, ascending, (N, c); those that are the number of points or more stand for nothing.
        bound: no point that is left out has a smaller squared distance by what was computed, (N,).
        squares: squared lengths of the queries, by which products are off (N,); None where `bound` is not of products.
    """

    indices: Tensor
    bound: Tensor
    squares: Tensor | None = None


class Groups(NamedTuple):
    """Groups of points, the nearest first.

    Attributes:
        indices: of groups, (N, c).
        bounds: squared distances of the nearest point of each as computed, ascending, (N, c); no group that is left out
            has a smaller one than the last.
        squares: squared lengths of the queries, by which products are off (N,).
    """

    indices: Tensor
    bounds: Tensor
    squares: Tensor


class Tile(NamedTuple):
    """Some queries, and how near they come to every group.

    Attributes:
        rows: which of the queries these are.
        squares: their squared lengths after the shift, by which products are off (n,).
        minima: squared distances of the nearest point of every group as computed, less `squares`, (groups, n); some
            groups more, which are endless.
    """

    rows: slice
    squares: Tensor
    minima: Tensor


@dataclass(frozen=True, eq=False)
class Products:
    """Training points (T, P) as matrix products need them.

    What it keeps beside the points: T squared lengths, and copies that are centred (where points lie far from the
    origin) or have these lengths beside them, each only if it takes at most a quarter of `memory`.
    """

    points: Tensor
    memory: int

    def candidates(self, queries: Tensor, count: int, k: int) -> Candidates:
        """The members of the `count` best groups; k says how many neighbours are wanted."""
        total, size = len(self.points), self._size(k)
        if count >= -(-total // size):
            everything = torch.arange(total, device=queries.device).expand(len(queries), total)
            return Candidates(everything, queries.new_full((len(queries),), torch.inf))
        found = self.groups(queries, count + 1, size)
        return Candidates(members(found.indices[:, :count], size), found.bounds[:, -1], found.squares)

    def _size(self, k: int) -> int:
        """Points of a group: one, where looking at all products takes less than comparing members of many groups."""
        compared = k * GROUP * self.points.shape[1]
        return GROUP if k <= MANY or compared <= _DIRECTLY * len(self.points) else 1

    def groups(self, queries: Tensor, count: int, size: int = GROUP) -> Groups:
        """The `count` best groups of so many points."""
        shifted = queries if self.shift is None else queries - self.shift
        squares = (shifted**2).sum(1)
        smallest, best = self._best_groups(shifted, count, size)
        best = best.clamp_max(
            -(-len(self.points) // size) - 1
        )  # where all overflow, what fills up the last run is first
        return Groups(best, smallest + squares[:, None], squares)

    def tiles(self, queries: Tensor) -> Iterator[Tile]:
        """All groups beside all queries, as many queries at a time as fit into a quarter of the memory."""
        groups = -(-len(self.points) // GROUP)
        step = max(1, min(self._tile(len(queries))[0], self.memory // (4 * 8 * groups)))
        for start in range(0, len(queries), step):
            rows = slice(start, start + step)
            shifted = queries[rows] if self.shift is None else queries[rows] - self.shift
            minima = self._minima(self._twice(shifted), 0, len(self.points), GROUP)
            yield Tile(rows, (shifted**2).sum(1), minima)

    def are_beyond(self, found: Candidates, squared: Tensor) -> Tensor:
        """For which queries every point that is left out is proven to be farther than `squared` (N,)."""
        return found.bound > (squared if found.squares is None else self.within_reach(found.squares, squared))

    def within_reach(self, squares: Tensor, squared: Tensor) -> Tensor:
        """The largest squared distance by products that a point at `squared` (N,) or nearer may have.

        A point that is longer than the query, `squares` (N,), by more than that distance is farther, whatever its
        product says. So rounding errors count of points that are no longer, and one that lies far off does not matter.
        """
        longest = (squares.sqrt() + squared.sqrt()).square() * _A_LITTLE_MORE
        return squared + self._error(squares + longest.clamp_max(self._reach), roundoff(self.points))

    def within(self, queries: Tensor, squared: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Every pair (query, point) that products in float64 cannot prove to be farther than `squared` (N,).

        They come in blocks of points, in the order of points; inside a block in the order of queries, then of points.
        """
        shift = 0.0 if self.shift is None else self.shift.double()
        doubles = queries.double() - shift
        squares = (doubles**2).sum(1)
        limit = squared.double() + self._error(squares + self._reach, 2**-53) - squares
        for start in range(0, len(self.points), self.block):
            block = self.points[start : start + self.block].double() - shift
            lengths = (block**2).sum(1)
            rows = max(1, self.memory // (4 * 8 * len(block)))
            for first in range(0, len(queries), rows):
                part = slice(first, first + rows)
                product = torch.addmm(lengths[None], doubles[part], block.T, alpha=-2)
                row, column = (~(product > limit[part, None])).nonzero().unbind(1)
                yield row + first, column + start

    @property
    def block(self) -> int:
        """Rows of points or queries whose copy in float64 takes a quarter of the memory."""
        return max(1, self.memory // (4 * 8 * max(64, self.points.shape[1])))

    @property
    def _step(self) -> int:
        """Rows of points that are looked at at a time where each is looked at once."""
        return max(1, min(self.block, _ONCE // max(1, self.points.shape[1])))

    def _tile(self, queries: int) -> tuple[int, int]:
        """Queries and points of one product, which takes at most a quarter of the memory."""
        numbers, small = max(GROUP, self.memory // (4 * 8)), small_steps_pay(self.points)
        wanted = _ROWS * torch.get_num_threads() if small else min(_ROWS_ELSEWHERE, max(1, queries))
        rows = min(wanted, max(1, numbers // (64 * GROUP)))
        columns = numbers // rows // GROUP * GROUP
        return rows, min(_COLUMNS, columns) if small else columns

    @cached_property
    def shift(self) -> Tensor | None:
        """The mean, where lengths from there are much smaller than from the origin; rounding errors go by lengths."""
        sums = [block.sum(0, dtype=torch.float64) for block in self.points.split(self._step)]
        center = (torch.stack(sums).sum(0) / len(self.points)).to(self.points.dtype)
        squares = sum(float(block.square().sum(dtype=torch.float64)) for block in self.points.split(self._step))
        mean = squares / len(self.points)  # from the center it is this less the center's own square
        return None if math.isfinite(mean) and float(center.square().sum()) < _FAR * mean else center

    @cached_property
    def _shifted(self) -> Tensor | None:
        """All points after their shift; None where that is a copy that takes too much memory."""
        if self.shift is None:
            return self.points
        return self.points - self.shift if 4 * self.points.nbytes <= self.memory else None

    @cached_property
    def _lengths(self) -> Tensor:
        """Squared lengths of the points after their shift, (T,)."""
        lengths = self.points.new_empty(len(self.points))  # a list of parts would lie in what was freed, and pin it
        for start in range(0, len(self.points), self._step):
            part = self._part(start, start + self._step)
            torch.sum(part**2, 1, out=lengths[start : start + self._step])
        return lengths

    @cached_property
    def _with_lengths(self) -> Tensor | None:
        """Shifted points and their squared lengths (T, P + 1), where that copy does not take too much memory."""
        if 4 * (self.points.nbytes + self._lengths.nbytes) > self.memory:
            return None
        return torch.cat([self._part(0, len(self.points)), self._lengths[:, None]], 1)

    @cached_property
    def _reach(self) -> float:
        return float(self._lengths.max())

    def _part(self, start: int, stop: int) -> Tensor:
        if self._shifted is not None:
            return self._shifted[start:stop]
        assert self.shift is not None
        return self.points[start:stop] - self.shift

    def _error(self, lengths: Tensor, roundoff: float) -> Tensor:
        """By how much products may be off, by the squared lengths of query and point together."""
        return roundoff_of_sums(self.points.shape[1]) * roundoff * lengths

    def _best_groups(self, queries: Tensor, kept: int, size: int) -> tuple[Tensor, Tensor]:
        """The `kept` smallest ‖t‖² − 2 q·t of groups (N, kept), ascending, and which groups these are."""
        found = [self._best_of_tile(rows, kept, size) for rows in queries.split(self._tile(len(queries))[0])]
        return torch.cat([values for values, _ in found]), torch.cat([groups for _, groups in found])

    def _twice(self, queries: Tensor) -> Tensor:
        """What points, with their squared lengths or without, are multiplied by, (N, P + 1) or (N, P)."""
        if self._with_lengths is None:
            return -2 * queries
        return torch.cat([-2 * queries, torch.ones_like(queries[:, :1])], 1)

    def _best_of_tile(self, queries: Tensor, kept: int, size: int) -> tuple[Tensor, Tensor]:
        twice = self._twice(queries)
        columns, most = self._tile(len(queries))[1], self.memory // (4 * 8) // len(queries)
        if small_steps_pay(queries):
            most = min(most, max(_MINIMA_AT_ONCE // len(queries), 2 * _WORTH_RUNS * kept))
        wide = max(1, most * size // columns) * columns
        best: tuple[Tensor, Tensor] | None = None
        for start in range(0, len(self.points), wide):
            minima = self._minima(twice, start, min(start + wide, len(self.points)), size)
            values, groups = smallest(minima, kept)
            groups = groups + start // size
            if best is not None:
                values, groups = torch.cat([best[0], values], 1), torch.cat([best[1], groups], 1)
                values, order = values.topk(min(kept, values.shape[1]), 1, largest=False)
                groups = groups.gather(1, order)
            best = values, groups
        assert best is not None
        return best

    def _minima(self, twice: Tensor, start: int, stop: int, size: int) -> Tensor:
        """The smallest ‖t‖² − 2 q·t of every group of points from `start` to `stop`, (groups, N)."""
        count = len(twice)
        groups = -(-(stop - start) // size)
        minima = twice.new_empty(-(-groups // _MINIMA) * _MINIMA, count)
        minima[groups:] = torch.inf
        columns = self._tile(count)[1]
        for first in range(start, stop, columns):
            last = min(first + columns, stop)
            product, into = self._product(first, last, twice), minima[(first - start) // size :]
            whole = (last - first) // size
            torch.amin(product[: whole * size].view(whole, size, count), 1, out=into[:whole])
            if whole * size < last - first:
                torch.amin(product[whole * size :], 0, out=into[whole])
        return minima

    def _product(self, first: int, last: int, twice: Tensor) -> Tensor:
        """‖t‖² − 2 q·t of some points, (points, N)."""
        if self._with_lengths is not None:
            return multiplied(self._with_lengths[first:last], twice)
        return multiplied(self._part(first, last), twice).add_(self._lengths[first:last, None])


def smallest(minima: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """The `kept` smallest of each column (M, N), ascending, and their places, (N, kept) each.

    They lie in those runs of `_MINIMA` that have the smallest minima, so only these are looked at.
    """
    count, columns = minima.shape
    if count < _WORTH_RUNS * kept:
        values, places = minima.T.contiguous().topk(min(kept, count), 1, largest=False)
        return values, places
    runs = minima.view(-1, _MINIMA, columns).amin(1).T.contiguous().topk(kept, 1, largest=False).indices
    places = (runs[:, :, None] * _MINIMA + torch.arange(_MINIMA, device=runs.device)).flatten(1)
    values, order = minima.T.gather(1, places).topk(kept, 1, largest=False)
    return values, places.gather(1, order)


def members(groups: Tensor, size: int = GROUP) -> Tensor:
    """Indices of the points of groups (N, c), ascending, (N, c · size)."""
    return (groups.sort(1).values[:, :, None] * size + torch.arange(size, device=groups.device)).flatten(1)


def roundoff_of_sums(terms: int) -> float:
    """How many roundings a sum of products is off by, about: errors of random signs, four deviations and some more."""
    return 4 * math.sqrt(terms) + 8
