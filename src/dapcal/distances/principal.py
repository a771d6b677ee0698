"""Wide points as few numbers: where they lie along the directions in which they vary most, and how far off these.

Let V have orthonormal columns, and u(t) = (Vᵀt, ‖t − VVᵀt‖). Then ‖u(q) − u(t)‖ ≤ ‖q − t‖, by Pythagoras, and by the
triangle inequality in what V leaves out. Features of a trained network vary in few directions, so that nearly all of
their points are proven to be farther than the nearest by a tenth of the numbers; any V gives right answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dapcal.distances.products import GROUP, Groups, Products, members, roundoff_of_sums

LEAST_QUERIES = 256  # that are worth it
_LEAST_WIDTH, _LEAST_POINTS = 64, 2_000  # below, there is nothing to save
_TRIED = (16, 32, 64, 128)  # directions
_MORE = 64  # groups that are looked at, beside one for each neighbour
_DIRECTLY = 128  # multiplications that take as long as comparing one number directly, about
_WORTH = 0.7  # of the multiplications of all numbers; above, what is saved is too little
_SEEN, _ASKED, _AMONG = 2_048, 128, 8_192  # points that give directions, and that try them out

Limit = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Principal:
    """Training points (T, P) as few numbers, and their products.

    Attributes:
        center: of the points, (P,), in float64.
        directions: V, (P, R), in float64.
        rest: what is subtracted from ‖t − VVᵀt‖, so that lengths stay small.
        products: of the points as R + 1 numbers.
    """

    center: Tensor
    directions: Tensor
    rest: float
    products: Products

    def nearest(
        self, queries: Tensor, k: int, among: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]], limit: Limit
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The k nearest of the points in the best groups, and for which queries any other is farther, (N,).

        Args:
            queries: (N, P).
            k: neighbours.
            among: their distances and indices among candidates, directly; from queries, candidates and k.
            limit: squared distances by which another point would not be as near, from distances.
        """
        found = self.products.groups(self._few(queries), k + _MORE)
        width = k + 1
        distances, indices = among(queries, members(found.indices[:, :width]), k)
        needed = self._needed(found, limit(distances[:, -1]))
        settled = needed <= width
        while width < k + _MORE - 1:  # each query among as many groups as may hold a nearer point
            width, least = min(2 * width, k + _MORE - 1), width
            rows = ((needed > least) & (needed <= width)).nonzero().flatten()
            if len(rows):
                distances[rows], indices[rows] = among(queries[rows], members(found.indices[rows, :width]), k)
                settled[rows] = True
        return distances, indices, settled

    def _few(self, queries: Tensor) -> Tensor:
        found = _reduced(queries, self.center, self.directions)
        found[:, -1] -= self.rest
        return found.to(queries.dtype)

    def _needed(self, found: Groups, squared: Tensor) -> Tensor:
        """How many of the best groups may hold a point as near as `squared`, (N,); all of them: others may, too.

        A point at a distance D or less from a query of length l has at most the length l + D, so that rounding both to
        their few numbers adds no more than `off` times 2 (l + D) to their distance.
        """
        off = torch.finfo(squared.dtype).eps + roundoff_of_sums(len(self.center)) * 2**-52
        shift = self.products.shift
        lengths = found.squares.sqrt() + (0.0 if shift is None else shift.norm())
        distance = squared.sqrt()
        rounded = (distance + 2 * off * (lengths + distance)) ** 2
        return (~(found.bounds > self.products.within_reach(found.squares, rounded)[:, None])).sum(1)


def principal(points: Tensor, memory: int) -> Principal | None:
    """Points as few numbers; None where that does not help, or takes more than a quarter of `memory`."""
    total, width = points.shape
    if points.device.type != "cpu" or width < _LEAST_WIDTH or total < _LEAST_POINTS:
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
    reduced = points.new_empty(total, count + 1)
    rest = float(_reduced(_spaced(points, _SEEN), center, directions)[:, -1].mean())
    for start in range(0, total, _SEEN):
        part = _reduced(points[start : start + _SEEN], center, directions)
        part[:, -1] -= rest
        reduced[start : start + _SEEN] = part
    return Principal(center, directions, rest, Products(reduced, memory))


def _reduced(points: Tensor, center: Tensor, directions: Tensor) -> Tensor:
    """(Vᵀt, ‖t − VVᵀt‖) of points from the center, (N, R + 1), in float64."""
    own = points.double() - center
    along = own @ directions
    return torch.cat([along, (own - along @ directions.T).norm(dim=1, keepdim=True)], 1)


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
        count: total * (count + 1) + _DIRECTLY * width * GROUP * (2 + left)
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
