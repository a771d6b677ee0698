"""Wide points as few numbers: where they lie along the directions in which they vary most, and how far off these.

Let V have orthonormal columns, and u(t) = (Vᵀt, ‖t − VVᵀt‖). Then ‖u(q) − u(t)‖ ≤ ‖q − t‖, by Pythagoras, and by the
triangle inequality in what V leaves out. Features of a trained network vary in few directions, so that nearly all of
their points are proven to be farther than the nearest by a tenth of the numbers; any V gives right answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dapcal.distances.direct import distances_of_pairs, nearest_among, nearest_of_pairs, small_steps_pay
from dapcal.distances.products import GROUP, Products, Tile, roundoff_of_sums, smallest

LEAST_QUERIES = 4  # of a search that are worth it
WORTH_BUILDING = 1_024  # queries, in one search or in several, for which directions are worth finding
_LEAST_WIDTH, _LEAST_POINTS = 64, 2_000  # below, there is nothing to save
_TRIED = (16, 32, 64, 128)  # directions
_MORE = 64  # groups that are looked at, beside one for each neighbour; who needs more is left to all numbers
_DIRECTLY = 64  # multiplications that take as long as comparing one number directly, about
_PROJECTED = 4  # likewise, of one number's product with a direction in float64
_WORTH = 0.7  # of the multiplications of all numbers; above, what is saved is too little
_SEEN, _ASKED, _AMONG = 2_048, 128, 8_192  # points that give directions, and that try them out
_CACHED = 2**19  # numbers that are compared at a time: 2 MiB

Limit = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Principal:
    """Training points (T, P) as few numbers, and their products.

    Attributes:
        center: of the points, (P,), in float64.
        directions: V, (P, R), in float64.
        rest: what is subtracted from ‖t − VVᵀt‖, so that lengths stay small.
        products: of the points as R + 1 numbers.
        grouped: these, group by group, (T / `GROUP`, `GROUP`, R + 1); what fills up the last group is endless.
    """

    center: Tensor
    directions: Tensor
    rest: float
    products: Products
    grouped: Tensor

    def nearest(
        self, points: Tensor, queries: Tensor, k: int, limit: Limit, memory: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The k nearest of the points, as it seems, and for which queries any other is farther, (N,).

        The k that seem nearest by few numbers say how near the nearest are at most. All others that may be as near by
        few numbers are compared directly, which are few, too.

        Args:
            points: training points (T, P).
            queries: (N, P).
            k: neighbours.
            limit: squared distances by which another point would not be as near, from distances.
            memory: bytes that differences may take, about.
        """
        few = self._few(queries)
        parts = [
            self._of_tile(points, queries[tile.rows], few[tile.rows], tile, k, limit, memory)
            for tile in self.products.tiles(few)
        ]
        distances, indices, settled = (torch.cat(part) for part in zip(*parts, strict=True))
        return distances, indices, settled

    def _of_tile(
        self, points: Tensor, queries: Tensor, few: Tensor, tile: Tile, k: int, limit: Limit, memory: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        distances, indices = nearest_among(points, queries, self._likely(few, tile.minima, k), k, memory=memory)
        reach = self._reach(tile.squares, limit(distances[:, -1]))
        threshold = self.products.within_reach(tile.squares, reach) - tile.squares
        is_beyond = tile.minima[: len(self.grouped)] > threshold  # (groups, n); what is no number may be near
        group, row = is_beyond.logical_not_().nonzero().unbind(1)
        settled = torch.bincount(row, minlength=len(queries)) <= k + _MORE
        own = settled[row]
        row, column = self._as_near(few, row[own], group[own], reach)
        pairs = nearest_of_pairs(row, column, distances_of_pairs(points, queries, row, column, memory), k)
        settled &= torch.bincount(pairs.row, minlength=len(queries)) == k
        own = settled[pairs.row]
        distances[settled], indices[settled] = pairs.distance[own].view(-1, k), pairs.column[own].view(-1, k)
        return distances, indices, settled

    def _likely(self, few: Tensor, minima: Tensor, k: int) -> Tensor:
        """The k points of the k best groups that are nearest by few numbers, ascending, (n, k)."""
        best = smallest(minima, k)[1].clamp_max(len(self.grouped) - 1)  # where all overflow, others may be first
        parts = zip(few.split(self._step(k)), best.split(self._step(k)), strict=True)
        own = torch.cat([self._squared(own, part).flatten(1).topk(k, 1, largest=False).indices for own, part in parts])
        return (best.gather(1, own // GROUP) * GROUP + own % GROUP).sort(1).values

    def _as_near(self, few: Tensor, rows: Tensor, groups: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
        """Of pairs (query, group) the pairs (query, point) as near as `reach` (n,) by few numbers."""
        # what rounding in single numbers may have added
        most = reach * (1 + 2 * roundoff_of_sums(few.shape[1]) * torch.finfo(few.dtype).eps)
        found = []
        for row, group in zip(rows.split(self._step(1)), groups.split(self._step(1)), strict=True):
            squared = self._squared(few[row], group[:, None])[:, 0]
            pair, member = (squared <= most[row, None]).nonzero().unbind(1)
            found.append((row[pair], group[pair] * GROUP + member))
        return torch.cat([row for row, _ in found]), torch.cat([column for _, column in found])

    def _squared(self, few: Tensor, groups: Tensor) -> Tensor:
        """Squared distances by few numbers from queries (n, R + 1) to the members of groups (n, c), (n, c, `GROUP`)."""
        return (self.grouped[groups] - few[:, None, None]).square_().sum(3)

    def _step(self, groups: int) -> int:
        """Queries that are compared with the members of so many groups at a time."""
        return max(1, _CACHED // (groups * self.grouped[0].numel()))

    def _few(self, queries: Tensor) -> Tensor:
        found = _reduced(queries, self.center, self.directions)
        found[:, -1] -= self.rest
        return found.to(queries.dtype)

    def _reach(self, squares: Tensor, squared: Tensor) -> Tensor:
        """The largest squared distance by few numbers that a point at `squared` (N,) or nearer may have.

        A point at a distance D or less from a query of length l has at most the length l + D, so that rounding both to
        their few numbers adds no more than `off` times 2 (l + D) to their distance. What is left out is the root of a
        difference of squares, which is off by the root of their rounding.
        """
        roundoff = roundoff_of_sums(len(self.center)) * 2**-52
        off = torch.finfo(squared.dtype).eps + roundoff + math.sqrt(roundoff)
        shift = self.products.shift
        lengths = squares.sqrt() + (0.0 if shift is None else shift.norm())
        distance = squared.sqrt()
        return (distance + 2 * off * (lengths + distance)) ** 2


def principal(points: Tensor, memory: int) -> Principal | None:
    """Points as few numbers; None where that does not help, or takes more than a quarter of `memory`."""
    total, width = points.shape
    if not small_steps_pay(points) or width < _LEAST_WIDTH or total < _LEAST_POINTS:
        return None
    center = _spaced(points, _SEEN).double().mean(0)
    most = min(_TRIED[-1], width // 2)
    if 4 * total * (most + 1) * points.element_size() > memory or not center.isfinite().all():
        return None
    directions = _directions(_spaced(points, _SEEN).double() - center, most)
    count = _enough(points, center, directions)
    if count is None:
        return None
    directions = directions[:, :count].contiguous()
    grouped = points.new_full((-(-total // GROUP), GROUP, count + 1), torch.inf)
    reduced = grouped.view(-1, count + 1)[:total]
    rest = float(_reduced(_spaced(points, _SEEN), center, directions)[:, -1].mean())
    for start in range(0, total, _SEEN):
        part = _reduced(points[start : start + _SEEN], center, directions)
        part[:, -1] -= rest
        reduced[start : start + _SEEN] = part
    return Principal(center, directions, rest, Products(reduced, memory), grouped)


def _reduced(points: Tensor, center: Tensor, directions: Tensor) -> Tensor:
    """(Vᵀt, ‖t − VVᵀt‖) of points from the center, (N, R + 1), in float64."""
    own = points.double() - center
    along = own @ directions
    rest = own.square().sum(1, keepdim=True) - along.square().sum(1, keepdim=True)  # by Pythagoras
    return torch.cat([along, rest.clamp_min(0).sqrt()], 1)


def _directions(centered: Tensor, count: int) -> Tensor:
    """About the first `count` principal directions of points (M, P), orthonormal, (P, count): a randomised range."""
    generator = torch.Generator().manual_seed(0)
    wanted = min(count + 8, *centered.shape)
    found = torch.randn(centered.shape[1], wanted, generator=generator, dtype=centered.dtype)
    for _ in range(2):
        found = torch.linalg.qr(centered.T @ (centered @ found)).Q
    projected = centered @ found
    _, turned = torch.linalg.eigh(projected.T @ projected)
    return torch.linalg.qr((found @ turned).flip(1)).Q[:, :count]


def _enough(points: Tensor, center: Tensor, directions: Tensor) -> int | None:
    """How many directions cost least, tried on some of the points; None if none saves enough."""
    total, width = points.shape
    among = _spaced(points, _AMONG)
    every = max(1, len(among) // _ASKED)
    asked, own = among[::every], torch.arange(0, len(among), every)[:, None]
    nearest = torch.cdist(asked.double(), among.double()).scatter(1, own, torch.inf).amin(1, keepdim=True)
    costs = {
        count: total * (count + 1)
        + _PROJECTED * width * count
        + _DIRECTLY * (GROUP * (2 + left) * (count + 1) + (2 + left) * width)
        for count, left in _left_over(asked, among, nearest, center, directions)
    }
    best = min(costs, key=lambda count: costs[count])
    return best if costs[best] <= _WORTH * total * width else None


def _left_over(
    asked: Tensor, among: Tensor, nearest: Tensor, center: Tensor, directions: Tensor
) -> Iterator[tuple[int, float]]:
    """How many points are not proven to be farther than the nearest, on average, by ever more directions."""
    own = [part.double() - center for part in (asked, among)]
    along, squares = [part @ directions for part in own], [(part**2).sum(1) for part in own]
    for count in sorted({min(tried, directions.shape[1]) for tried in _TRIED}):
        few = [part[:, :count] for part in along]
        rest = [(whole - (part**2).sum(1)).clamp_min(0).sqrt() for whole, part in zip(squares, few, strict=True)]
        queries, points = (torch.cat([part, off[:, None]], 1) for part, off in zip(few, rest, strict=True))
        yield count, float((torch.cdist(queries, points) <= nearest).double().sum(1).mean()) - 1  # without itself


def _spaced(points: Tensor, most: int) -> Tensor:
    """At most so many of the points, evenly spaced."""
    return points[:: -(-len(points) // most)]
