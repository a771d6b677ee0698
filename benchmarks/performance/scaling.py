"""How time grows with training points, queries and numbers of a point."""

from __future__ import annotations

from collections.abc import Callable

import faiss

from dapcal.distances import IVF, TorchIndex
from dapcal.experiments.performance import Line
from performance.nearest import made
from performance.turns import in_turns

__all__ = ["lines"]

POINTS, QUERIES, NUMBERS = 100_000, 1_000, 64
PROBES, MOST_LISTED = 16, 10**6  # lists that are searched, and points that lists are built of within a minute
OURS, FAISS, LISTS = "exact, ours", "exact, faiss", f"approximate, ours: {PROBES} lists searched"


def lines(repeats: int, small: bool) -> list[Line]:
    most = 5 if small else 7  # powers of ten
    over_points = [10**power for power in range(3, most + 1)]
    over_queries = [10**power for power in range(0, most - 2)]
    over_numbers = [4, 16, 64, 256, 1024]
    points, queries = (POINTS // 10, QUERIES // 10) if small else (POINTS, QUERIES)
    return [
        *line("training points", over_points, lambda size: (100, size, NUMBERS), repeats),
        *line("queries", over_queries, lambda size: (size, points, NUMBERS), repeats),
        *line("numbers of a point", over_numbers, lambda size: (queries, points, size), repeats),
    ]


def line(over: str, sizes: list[int], shape: Callable[[int], tuple[int, int, int]], repeats: int) -> list[Line]:
    """Of every way."""
    found: dict[str, list[list[float]]] = {OURS: [], FAISS: [], LISTS: []}
    for size in sizes:
        for way, seconds in in_turns(ways(*shape(size)), repeats).items():
            found[way].append(seconds)
    return [Line(way, over, sizes[: len(seconds)], seconds) for way, seconds in found.items()]


def ways(queries: int, points: int, numbers: int) -> dict[str, Callable[[], object]]:
    """Searches among the same points, with every index built before."""
    train, new = made(points, numbers, 0), made(queries, numbers, 1)
    index = TorchIndex(train)
    found = {OURS: lambda: index.query(new, 1), FAISS: lambda: faiss.knn(new.numpy(), train.numpy(), 1)}
    if points <= MOST_LISTED:
        lists = IVF(probes=PROBES)(train)
        found[LISTS] = lambda: lists.query(new, 1)
    return found
