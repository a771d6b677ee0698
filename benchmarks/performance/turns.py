"""Ways of doing one thing, timed in turns: what else the machine does slows all of them, and a ratio stays."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable, Mapping
from pathlib import Path

Ways = Mapping[str, Callable[[], object]]


def in_turns(ways: Ways, repeats: int, warm: bool = True) -> dict[str, list[float]]:
    """Seconds of every way in every round; each round begins with the next of them.

    Args:
        ways: by name.
        repeats: rounds.
        warm: run each once before, untimed.
    """
    names = list(ways)
    for name in names if warm else ():
        ways[name]()
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(repeats):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(seconds(ways[name]))
    return found


def seconds(way: Callable[[], object]) -> float:
    """Of one call."""
    started = time.perf_counter()
    way()
    return time.perf_counter() - started


def shares(way: Callable[[], object], most: int = 4) -> dict[str, float]:
    """The functions that one call spends most time in, without those they call, as shares of it."""
    profile = cProfile.Profile()
    profile.runcall(way)
    stats = pstats.Stats(profile)
    own: dict[str, float] = {}
    for (path, _, function), (_, _, inner, *_) in stats.stats.items():  # type: ignore[attr-defined]
        name = _plain(path, function)
        own[name] = own.get(name, 0.0) + inner
    total = sum(own.values())
    largest = sorted(own, key=own.__getitem__, reverse=True)[:most]
    return {name: round(own[name] / total, 3) for name in largest if own[name] >= 0.03 * total}


def _plain(path: str, function: str) -> str:
    """`neighbors.query` for a function of a file; a built-in is `{built-in method torch.addmm}` to the profiler."""
    if path.startswith("~"):
        words = function.strip("<>{}").replace("'", "").removeprefix("built-in method ").split(" ")
        return words[1] if words[0] == "method" else words[0]
    return f"{Path(path).stem}.{function}"
