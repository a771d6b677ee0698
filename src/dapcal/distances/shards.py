"""The nearest of several parts of the training points, as if these were one: to the last bit, ties by index."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dapcal.storing import Stores
from dapcal.types import NeighborIndex

Found = tuple[Tensor, Tensor]
"""Distances (N, k), ascending, and indices (N, k)."""


@dataclass(frozen=True, eq=False)
class ShardedIndex:
    """Asks every shard, and keeps the nearest; exact where the shards are.

    Args:
        shards: an index for every part of the points, in their order.
        sizes: how many points each has.
    """

    stores = Stores()

    shards: tuple[NeighborIndex, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.shards or len(self.shards) != len(self.sizes) or min(self.sizes) < 1:
            raise ValueError(
                f"Expected at least one shard and the number of points of each, got {len(self.shards)} shards of sizes "
                f"{list(self.sizes)}"
            )

    def query(self, points: Tensor, k: int = 1) -> Found:
        """Distances (N, k), ascending, and indices (N, k) in all shards together."""
        total = sum(self.sizes)
        if not 1 <= k <= total:
            raise ValueError(f"Expected `k` between 1 and {total} (training inputs), got {k}")
        found = (shard.query(points, min(k, size)) for shard, size in zip(self.shards, self.sizes, strict=True))
        return merged(found, self.sizes, k)


def merged(found: Iterable[Found], sizes: Sequence[int], k: int) -> Found:
    """The k nearest of what every shard has found, min(k, its size) neighbours, with indices in all shards together.

    Where shards answer one after the other, or from other machines, as many answers as one are held at a time.
    """
    nearest: Found | None = None
    for (distances, indices), start in zip(found, accumulate(sizes, initial=0), strict=False):
        indices = indices + start
        if nearest is not None:  # those of earlier shards stand first, so that equal ones stay in the order of points
            distances = torch.cat([nearest[0], distances.to(nearest[0])], 1)
            indices = torch.cat([nearest[1], indices.to(nearest[1])], 1)
        order = distances.argsort(dim=1, stable=True)[:, :k]
        nearest = distances.gather(1, order), indices.gather(1, order)
    assert nearest is not None
    return nearest
