"""The engine that needs nothing: every call is done here, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Held = TypeVar("Held")
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Local:
    """The process that asks (a `dapcal.engines.Engine`).

    >>> list(Local().each(2, lambda held, item: held * item, [5, 7]))
    [(0, 10), (1, 14)]
    """

    workers: int = 1

    def each(
        self, held: Held, work: Callable[[Held, Item], Result], items: Iterable[Item]
    ) -> Iterator[tuple[int, Result]]:
        """As `Engine.each`, in the order of the items."""
        for place, item in enumerate(items):
            yield place, work(held, item)

    def hold(self, make: Callable[[Item], Held], parts: Sequence[Item]) -> LocalHolders[Held]:
        """As `Engine.hold`."""
        return LocalHolders([make(part) for part in parts])

    def release(self) -> None:
        """There are none."""


@dataclass(frozen=True)
class LocalHolders(Generic[Held]):
    """Things that are held here (a `dapcal.engines.engine.Holders`)."""

    held: list[Held]

    def ask(self, work: Callable[[Held, Item], Result], item: Item) -> list[Result]:
        """As `Holders.ask`, one after the other."""
        return [work(held, item) for held in self.held]

    def end(self) -> None:
        """Let go."""
        self.held.clear()
