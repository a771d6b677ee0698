"""Actors of a Ray cluster that hold a part of something each; one that is lost is made again from its part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from dapcal.engines.nodes import library

Held = TypeVar("Held")
Item = TypeVar("Item")
Result = TypeVar("Result")

_TRIES = 8  # actors that are lost one after the other before it is given up


class RayHolders(Generic[Held]):
    """One actor a part (a `dapcal.engines.engine.Holders`)."""

    def __init__(self, make: Callable[[Item], Held], parts: Sequence[Item]) -> None:
        self.ray = library()
        # no CPU of their own: they answer while others wait for them
        self.new = self.ray.remote(_Holder).options(num_cpus=0, max_restarts=0, scheduling_strategy="SPREAD").remote
        self.make = self.ray.put(make)
        self.parts = [self.ray.put(part) for part in parts]
        self.actors = [self.new(self.make, part) for part in self.parts]

    def ask(self, work: Callable[[Held, Item], Result], item: Item) -> list[Result]:
        """As `Holders.ask`, all at once."""
        shared = self.ray.put((work, item))
        asked = [actor.ask.remote(shared) for actor in self.actors]
        return [self._answer(place, reference, shared) for place, reference in enumerate(asked)]

    def end(self) -> None:
        """Let go of actors and parts."""
        for actor in self.actors:
            self.ray.kill(actor)
        self.actors, self.parts = [], []

    def _answer(self, place: int, reference: Any, shared: Any) -> Any:
        for _ in range(_TRIES):
            try:
                return self.ray.get(reference)
            except self.ray.exceptions.RayTaskError as error:
                raise (error.cause if isinstance(error.cause, Exception) else error) from None
            except self.ray.exceptions.RayError:
                self.ray.kill(self.actors[place])
                self.actors[place] = self.new(self.make, self.parts[place])
                reference = self.actors[place].ask.remote(shared)
        raise RuntimeError(
            f"{_TRIES} holders of one part were lost one after the other; is there enough memory on the nodes?"
        )


class _Holder:
    def __init__(self, make: Callable[[Any], Any], part: Any) -> None:
        self.held = make(part)

    def ask(self, shared: tuple[Callable[[Any, Any], Any], Any]) -> Any:
        work, item = shared
        return work(self.held, item)
