"""How time grows with training points, queries and numbers of a point."""

from __future__ import annotations

from collections.abc import Callable

import faiss

from dapcal.distances.neighbors import TorchIndex
from dapcal.experiments.performance import Line
from performance.nearest import made
from performance.turns import in_turns

__all__ = ["lines"]

POINTS, QUERIES, NUMBERS = 100_000, 1_000, 64
OURS, FAISS = "exact, ours", "exact, faiss"


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
    """Of both ways."""
    found = {OURS: [], FAISS: []}
    for size in sizes:
        for way, seconds in in_turns(ways(*shape(size)), repeats).items():
            found[way].append(seconds)
    return [Line(way, over, sizes, seconds) for way, seconds in found.items()]


def ways(queries: int, points: int, numbers: int) -> dict[str, Callable[[], object]]:
    """Searches among the same points, of which there is one copy."""
    train, new = made(points, numbers, 0), made(queries, numbers, 1)
    index = TorchIndex(train)
    return {OURS: lambda: index.query(new, 1), FAISS: lambda: faiss.knn(new.numpy(), train.numpy(), 1)}
