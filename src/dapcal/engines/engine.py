"""What an engine is: one call, `each`, that hands items to workers; `named` finds one by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from dapcal.engines.local import Local

Held = TypeVar("Held")
HeldBy = TypeVar("HeldBy", covariant=True)
Item = TypeVar("Item")
Result = TypeVar("Result")

NAMES = ("local", "ray")
"""Engines, as commands name them."""


class Engine(Protocol):
    """Runs calls that do not depend on each other."""

    @property
    def workers(self) -> int:
        """Calls at a time."""
        ...

    def each(
        self, held: Held, work: Callable[[Held, Item], Result], items: Iterable[Item]
    ) -> Iterator[tuple[int, Result]]:
        """`work(held, item)` for every item: places of items with their results, as they are finished.

        An error of `work` is raised as it is: of several, that of the first item. A worker that is lost on the way
        costs time and nothing else.

        Args:
            held: what every worker holds once, e.g. a model.
            work: takes what is held and an item; the same result wherever and whenever it is called.
            items: taken a few ahead of what is finished.
        """
        ...

    def hold(self, make: Callable[[Item], Held], parts: Sequence[Item]) -> Holders[Held]:
        """Workers that hold `make(part)`, one for every part, until they are ended."""
        ...

    def release(self) -> None:
        """Let workers that wait for the next call go."""
        ...


class Holders(Protocol[HeldBy]):
    """Workers with something of their own each."""

    def ask(self, work: Callable[[HeldBy, Item], Result], item: Item) -> list[Result]:
        """`work(held, item)` of every worker, in their order."""
        ...

    def end(self) -> None:
        """Let go of what is held."""
        ...


def named(engine: str | Engine, address: str | None = None) -> Engine:
    """An engine by its name, "local" or "ray"; one that is an engine already comes back.

    Args:
        engine: the name.
        address: of a Ray cluster, host:port; by default the one that runs on this machine.
    """
    if not isinstance(engine, str):
        return engine
    if engine not in NAMES:
        raise ValueError(f"Expected an engine among {', '.join(NAMES)}, got {engine!r}")
    if engine == "ray":
        from dapcal.engines.ray import connected

        return connected(address)
    if address is not None:
        raise ValueError(f"An address ({address}) is for the engine ray; leave it out, or choose --engine ray")
    return Local()


def in_order(engine: Engine, held: Held, work: Callable[[Held, Item], Result], items: Iterable[Item]) -> list[Result]:
    """The results of all items, in their order."""
    found = dict(engine.each(held, work, items))
    return [found[place] for place in range(len(found))]
