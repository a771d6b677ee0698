"""The engine of several machines: an actor on every CPU of a Ray cluster, whatever happens to some of them.

Plain actors, and not Ray Data: its blocks have bounds of their own, so rows would be answered in other batches than on
one machine and to other last digits, and it has no checkpoint by block. What is used of Ray is what it is good at:
where actors run, how items and results travel, and who is told of what was lost.

A worker that is lost (its process, its node, or a result that lay there) is replaced, and what it had not handed over
is done again by another. `work` has the same result wherever it runs, so nobody can see it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dapcal.engines.nodes import check_versions, connect, cpus, library, nodes_of, versions
from dapcal.engines.ray_holders import Keepers, RayHolders

Held = TypeVar("Held")
Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 2  # items that a worker has at a time, so that it never waits for the next
_TRIES = 8  # workers that an item may take with it; then it is probably the reason
_PATIENCE = 120.0  # seconds without any worker


def connected(address: str | None = None) -> Ray:
    """The engine of a cluster that runs, where all nodes have the versions of this process.

    Args:
        address: of its head, host:port; by default that of the cluster that this machine is a node of.
    """
    connect(address)
    check_versions(nodes_of())
    return Ray(cpus())


@dataclass(frozen=True, eq=False)
class Ray:
    """A cluster that this process is connected to (a `dapcal.engines.Engine`).

    Workers stay for the next call, as each takes seconds to start, until `release` or until nobody has this object.
    """

    workers: int
    _idle: list[Any] = field(default_factory=list, repr=False)
    _keepers: Keepers = field(default_factory=Keepers, repr=False)

    def each(
        self, held: Held, work: Callable[[Held, Item], Result], items: Iterable[Item]
    ) -> Iterator[tuple[int, Result]]:
        """As `Engine.each`, in the order in which items are finished."""
        crew = _Crew(library().put((held, work, versions())), self._idle)
        try:
            for _ in range(self.workers):
                crew.hire()
            yield from crew.results(enumerate(items))
        finally:
            crew.dismiss()

    def hold(self, make: Callable[[Item], Held], parts: Sequence[Item]) -> RayHolders[Held]:
        """As `Engine.hold`, one actor for every part."""
        return RayHolders(self._keepers, make, parts)

    def release(self) -> None:
        """Let workers and what they hold go; the CPUs are free for others."""
        for actor in self._idle:
            library().kill(actor)
        self._idle.clear()
        self._keepers.release()

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """One call as a task, which is done again where it is lost."""
        task = library().remote(num_cpus=1, max_retries=_TRIES)(function).remote(*arguments)
        future: Future[Result] = Future()
        task.future().add_done_callback(lambda done: _hand_on(done, future))
        return future


def _hand_on(done: Future[Any], future: Future[Any]) -> None:
    """A result as it is, an error as the function raised it."""
    error = done.exception()
    if error is None:
        future.set_result(done.result())
    else:
        cause = getattr(error, "cause", None)
        future.set_exception(cause if isinstance(cause, Exception) else error)


class _Worker:
    """What runs on a node: it holds something, and works on items."""

    def begin(self, shared: tuple[Any, Callable[[Any, Any], Any], dict[str, str]]) -> None:
        """Take what is held; a node that has joined since may have other versions than those that were looked at."""
        held, work, expected = shared
        check_versions({"A node that has joined": versions()}, expected)
        self.held, self.work = held, work

    def do(self, item: Any) -> Any:
        """One item."""
        return self.work(self.held, item)


@dataclass
class _Job:
    place: int
    item: Any
    lost: int = 0  # workers, with this item in their hands


@dataclass(eq=False)
class _Hand:
    """A worker as the driver sees it: a reference to every result that it owes, None for having begun."""

    actor: Any
    owes: dict[Any, _Job | None] = field(default_factory=dict)
    begun: bool = False


class _Crew:
    """Workers, and the items between them."""

    def __init__(self, shared: Any, idle: list[Any]) -> None:
        self.ray, self.shared, self.idle = library(), shared, idle
        self.make = self.ray.remote(_Worker).options(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")
        self.hands: list[_Hand] = []
        self.again: deque[_Job] = deque()
        self.failed: tuple[int, BaseException] | None = None  # the first item with an error so far
        self.all_taken = False  # items
        self.seen = time.monotonic()  # a sign of life

    def hire(self) -> None:
        """Ask for one more worker, or take one that is idle; it comes when and where a CPU is free."""
        hand = _Hand(self.idle.pop() if self.idle else self.make.remote())
        hand.owes[hand.actor.begin.remote(self.shared)] = None
        self.hands.append(hand)

    def dismiss(self) -> None:
        """Those that have done all they were given are idle; the others end."""
        for hand in self.hands:
            if hand.begun and not hand.owes:
                self.idle.append(hand.actor)
            else:
                self.ray.kill(hand.actor)

    def results(self, items: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """All items with their results; after an error, those before it, as one of them may have an earlier one."""
        while True:
            self._give(items)
            owed = [job for hand in self.hands for job in hand.owes.values() if job is not None]
            if self.all_taken and not any(map(self._is_wanted, [*owed, *self.again])):
                if self.failed is not None:
                    raise self.failed[1]
                return
            self._check_alive()
            waiting = {reference: hand for hand in self.hands for reference in hand.owes}
            for reference in self.ray.wait(list(waiting), timeout=1.0)[0]:
                yield from self._taken(waiting[reference], reference)

    def _give(self, items: Iterator[tuple[int, Any]]) -> None:
        """Items to all workers that have begun, and have room for one."""
        for _ in range(_AHEAD):
            for hand in self.hands:
                if hand.begun and len(hand.owes) < _AHEAD and (job := self._next(items)) is not None:
                    hand.owes[hand.actor.do.remote(job.item)] = job

    def _next(self, items: Iterator[tuple[int, Any]]) -> _Job | None:
        while self.again:
            job = self.again.popleft()
            if self._is_wanted(job):
                return job
        found = None if self.all_taken else next(items, None)
        self.all_taken = found is None
        return None if found is None else _Job(*found)

    def _is_wanted(self, job: _Job) -> bool:
        return self.failed is None or job.place < self.failed[0]

    def _taken(self, hand: _Hand, reference: Any) -> Iterator[tuple[int, Any]]:
        """A result that has come; or an error, or the news that a worker is lost."""
        try:
            result = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            job = hand.owes.pop(reference)
            place = -1 if job is None else job.place  # what a worker cannot begin with, none can
            self.all_taken = True  # those that are left come after it
            if self.failed is None or place < self.failed[0]:
                self.failed = (place, error.cause if isinstance(error.cause, Exception) else error)
            return
        except self.ray.exceptions.RayError as error:
            self._replace(hand, error)
            return
        job, hand.begun, self.seen = hand.owes.pop(reference), True, time.monotonic()
        if job is not None:
            yield job.place, result

    def _replace(self, hand: _Hand, error: Exception) -> None:
        """Another worker for one that is lost, and what it owed to whoever is free first."""
        self.hands.remove(hand)
        self.ray.kill(hand.actor)  # it may be its node alone that is out of reach
        for job in filter(None, hand.owes.values()):
            job.lost += 1
            if job.lost >= _TRIES:
                told = " ".join(str(error).split())[:200]
                raise RuntimeError(
                    f"{_TRIES} workers were lost one after the other with the same part of the work ({told}); is there "
                    "enough memory on the nodes?"
                ) from None
            self.again.append(job)
        self.again = deque(sorted(self.again, key=lambda job: job.place))
        self.hire()

    def _check_alive(self) -> None:
        if any(hand.begun for hand in self.hands):
            self.seen = time.monotonic()
        elif time.monotonic() - self.seen > _PATIENCE:
            raise RuntimeError(
                f"No worker has come for {_PATIENCE:.0f} s: no node of the Ray cluster has a free CPU, or none can run "
                "dapcal; see `ray status` and `dapcal doctor --engine ray`"
            )
