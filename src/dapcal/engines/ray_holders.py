"""Actors of a Ray cluster that hold parts of things; what is lost with one of them is made again from its part."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from dapcal.engines.nodes import library

Held = TypeVar("Held")
Item = TypeVar("Item")
Result = TypeVar("Result")

_TRIES = 8  # actors that are lost one after the other before it is given up


class Keepers:
    """Actors that keep parts for whoever asks, as many as are needed."""

    def __init__(self) -> None:
        self.actors: list[Any] = []

    def at(self, place: int) -> Any:
        """The actor of a place."""
        while len(self.actors) <= place:
            self.actors.append(self._new())
        return self.actors[place]

    def replace(self, place: int) -> None:
        """Another actor for one that is lost."""
        library().kill(self.actors[place])
        self.actors[place] = self._new()

    def release(self) -> None:
        """End all of them."""
        for actor in self.actors:
            library().kill(actor)
        self.actors.clear()

    def _new(self) -> Any:
        # no CPU of their own: they answer while others wait for them
        return library().remote(_Keeper).options(num_cpus=0, max_restarts=0, scheduling_strategy="SPREAD").remote()


class RayHolders(Generic[Held]):
    """One part an actor (a `dapcal.engines.engine.Holders`)."""

    def __init__(self, keepers: Keepers, make: Callable[[Item], Held], parts: Sequence[Item]) -> None:
        self.ray, self.keepers, self.key = library(), keepers, secrets.token_hex(8)
        self.parts = [self.ray.put((make, part)) for part in parts]

    def ask(self, work: Callable[[Held, Item], Result], item: Item) -> list[Result]:
        """As `Holders.ask`, all at once."""
        shared = self.ray.put((work, item))
        asked = [self._asked(place, shared) for place in range(len(self.parts))]
        return [self._answer(place, reference, shared) for place, reference in enumerate(asked)]

    def end(self) -> None:
        """Let go of the parts."""
        for place in range(len(self.parts)):
            self.keepers.at(place).drop.remote(self.key)
        self.parts = []

    def _asked(self, place: int, shared: Any) -> Any:
        # in a list the part is not fetched before it is wanted
        return self.keepers.at(place).ask.remote(self.key, [self.parts[place]], shared)

    def _answer(self, place: int, reference: Any, shared: Any) -> Any:
        for _ in range(_TRIES):
            try:
                return self.ray.get(reference)
            except self.ray.exceptions.RayTaskError as error:
                raise (error.cause if isinstance(error.cause, Exception) else error) from None
            except self.ray.exceptions.RayError:
                self.keepers.replace(place)
                reference = self._asked(place, shared)
        raise RuntimeError(f"{_TRIES} workers with one part were lost one after the other; have nodes enough memory?")


class _Keeper:
    def __init__(self) -> None:
        self.held: dict[str, Any] = {}

    def ask(self, key: str, part: list[Any], shared: tuple[Callable[[Any, Any], Any], Any]) -> Any:
        if key not in self.held:
            make, content = library().get(part[0])
            self.held[key] = make(content)
        work, item = shared
        return work(self.held[key], item)

    def drop(self, key: str) -> None:
        self.held.pop(key, None)
