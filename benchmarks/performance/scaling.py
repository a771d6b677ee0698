"""How time grows with training points, queries and numbers of a point."""

from __future__ import annotations

from collections.abc import Callable

import faiss
import torch
from neighbors import DIMENSION, clustered, normal
from torch import Tensor

from dapcal.distances import IVF, TorchIndex
from dapcal.experiments.performance import Line
from performance.turns import in_turns

__all__ = ["lines"]

POINTS, QUERIES = 100_000, 1_000
PROBES, MOST_LISTED = 16, 10**6  # lists that are searched, and points that lists are built of within a minute
OURS, FAISS, LISTS = "exact, ours", "exact, faiss", f"approximate, ours: {PROBES} lists searched"


def lines(repeats: int, small: bool) -> list[Line]:
    most = 5 if small else 7  # powers of ten
    over_points = [10**power for power in range(3, most + 1)]
    over_queries = [10**power for power in range(0, most - 2)]
    over_numbers = [4, 16, 64, 256, 1024]
    points, queries = (POINTS // 10, QUERIES // 10) if small else (POINTS, QUERIES)
    return [
        *line("training points", over_points, lambda size: (as_features(size), as_features(100, 1)), repeats),
        *line("queries", over_queries, lambda size: (as_features(points), as_features(size, 1)), repeats),
        *line(
            "numbers of a point", over_numbers, lambda size: (normal(points, size), normal(queries, size, 1)), repeats
        ),
    ]


def line(over: str, sizes: list[int], made: Callable[[int], tuple[Tensor, Tensor]], repeats: int) -> list[Line]:
    """Of every way; `made` gives points and queries of a size."""
    found: dict[str, list[list[float]]] = {OURS: [], FAISS: [], LISTS: []}
    for size in sizes:
        for way, seconds in in_turns(ways(*made(size)), repeats).items():
            found[way].append(seconds)
    return [Line(way, over, sizes[: len(seconds)], seconds) for way, seconds in found.items()]


def ways(points: Tensor, asked: Tensor) -> dict[str, Callable[[], object]]:
    """Searches among the same points, with every index built before."""
    index = TorchIndex(points)
    found = {OURS: lambda: index.query(asked, 1), FAISS: lambda: faiss.knn(asked.numpy(), points.numpy(), 1)}
    if len(points) <= MOST_LISTED:
        lists = IVF(probes=PROBES)(points)
        found[LISTS] = lambda: lists.query(asked, 1)
    return found


def as_features(count: int, seed: int = 0) -> Tensor:
    """Points as features lie, made a million at a time, so that there is one copy of them."""
    made = torch.empty(count, DIMENSION)
    for part, block in enumerate(made.split(10**6)):
        block.copy_(clustered(len(block), 1000 * seed + part))
    return made
