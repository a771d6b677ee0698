"""What was computed of images that stay where they are, remembered by their place: distances, outputs, features."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from dapcal.distances import Distance, FittedSpace
from dapcal.distances.choosing import Measured
from dapcal.distances.projectors import Identity
from dapcal.posteriors.network import NetworkPosterior

Place = tuple[object, int, torch.Size, tuple[int, ...]]


class Memory:
    """Results for parts of some tensors, by key, address, shape and strides; those of other tensors are not kept.

    Args:
        images: tensors whose parts are remembered. They are held, since a freed tensor's address becomes another's.
    """

    def __init__(self, images: Iterable[Tensor]) -> None:
        self.kept = {x.untyped_storage().data_ptr(): x for x in images}
        self.known: dict[Place, Any] = {}

    def recall(self, key: object, x: Tensor, compute: Callable[[], Any]) -> Any:
        """What `compute` gives for x, computed once."""
        if x.untyped_storage().data_ptr() not in self.kept:
            return compute()
        place = (key, x.data_ptr(), x.shape, x.stride())
        if place not in self.known:
            self.known[place] = compute()
        return self.known[place]


def remembering(measured: Measured, memory: Memory) -> Measured:
    """The same, but no distance of an image is computed twice."""
    spaces, further = (
        tuple(_remembering(space, memory) for space in several)
        for several in (measured.distance.spaces, measured.further)
    )
    return measured._replace(distance=Distance(spaces), further=further)


@dataclass(frozen=True, eq=False)
class _Remembering(FittedSpace):
    """Spaces of one key share what they remember."""

    key: object
    memory: Memory

    def raw(self, x: Tensor) -> Tensor:
        """Distance before the radius, (N,)."""
        return self.memory.recall(self.key, x, lambda: super(_Remembering, self).raw(x))


def _remembering(space: FittedSpace, memory: Memory) -> FittedSpace:
    key = "inputs" if isinstance(space.projector, Identity) else space
    return _Remembering(space.name, space.projector, space.metric, space.radius, key, memory)


@dataclass(frozen=True, eq=False)
class Remembered(NetworkPosterior):
    """A posterior whose outputs at an image are computed once, whatever becomes of its likelihood."""

    memory: Memory = field(default_factory=lambda: Memory(()))

    def outputs(self, x: Tensor) -> Tensor:
        """Outputs of all draws, (S, N, C)."""
        return self.memory.recall(_Same(self.draws), x, lambda: super(Remembered, self).outputs(x))


@dataclass(frozen=True, eq=False)
class _Same:
    """A key that is equal for one and the same tensor, which it holds."""

    tensor: Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.tensor is other.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


def remembered(posterior: NetworkPosterior, memory: Memory) -> Remembered:
    """A posterior that remembers what it says of the memory's images."""
    own = {one.name: getattr(posterior, one.name) for one in fields(NetworkPosterior)}
    return Remembered(**own, memory=memory)
