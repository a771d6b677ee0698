"""Training points on several machines: features by blocks of inputs, and neighbours among shards of points.

While a `Spread` is open, features of its very inputs are computed block by block on an engine's workers, and
neighbours among points are looked for in shards that the workers hold. Both answer to the last bit as one machine
does: blocks hold whole batches of a pass, and shards are merged exactly (`dapcal.distances.shards`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from dapcal.distances.neighbors import TorchIndex
from dapcal.distances.shards import Found, merged
from dapcal.engines import Engine
from dapcal.engines.engine import Holders, in_order
from dapcal.types import NeighborIndex, Projector

_BLOCK = 8192  # inputs: whole batches of a pass over a network (512), whose results they must not change


@dataclass(frozen=True, eq=False)
class Spread:
    """Training inputs, and the engine that shares the work on them; None: it is done here."""

    engine: Engine | None
    train: Tensor
    held: dict[int, tuple[TorchIndex, Holders[TorchIndex]]] = field(default_factory=dict)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Share the work as long as this is open; shards stay with the workers until nobody knows of this object."""
        token = _OPEN.set(self if self.engine is not None else None)
        try:
            yield
        finally:
            _OPEN.reset(token)

    def nearest(self, engine: Engine, index: TorchIndex, points: Tensor, k: int) -> Found:
        """Neighbours among the shards of an index, which are handed out when it is asked for the first time."""
        parts = index.points.tensor_split(min(engine.workers, len(index.points)))
        if id(index) not in self.held:  # the index is kept too, so that no other gets its number
            copies = [part.cpu().clone() for part in parts]  # so that each travels alone
            self.held[id(index)] = (index, engine.hold(partial(TorchIndex, memory=index.memory), copies))
        found = self.held[id(index)][1].ask(_asked, (points.to(index.points).cpu(), k))
        distances, indices = merged(found, [len(part) for part in parts], k)
        return distances.to(index.points.device), indices.to(index.points.device)


_OPEN: ContextVar[Spread | None] = ContextVar("open spread", default=None)


def projected(project: Callable[[Projector, Tensor], Tensor], projector: Projector, x: Tensor) -> Tensor | None:
    """`project(projector, x)`, (N, P), block by block on workers; None where x are not the training inputs."""
    here = _OPEN.get()
    if here is None or here.engine is None or x is not here.train:
        return None
    blocks = (block.cpu().clone() for block in x.split(_BLOCK))
    return torch.cat(in_order(here.engine, projector, project, blocks)).to(x.device)


def neighbors(index: NeighborIndex, points: Tensor, k: int) -> Found:
    """The k nearest in an index: here, or in shards on workers where it holds training points."""
    here = _OPEN.get()
    if here is None or here.engine is None or type(index) is not TorchIndex or len(index.points) != len(here.train):
        return index.query(points, k)
    return here.nearest(here.engine, index, points, k)


def _asked(index: TorchIndex, asked: tuple[Tensor, int]) -> Found:
    points, k = asked
    return index.query(points, min(k, len(index.points)))
