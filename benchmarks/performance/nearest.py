"""The nearest neighbour, exactly, beside faiss and scikit-learn."""

from __future__ import annotations

from collections.abc import Callable

import faiss
import numpy as np
import torch
from sklearn.neighbors import NearestNeighbors

from dapcal.distances.neighbors import TorchIndex
from dapcal.experiments.performance import AS_FAST, Limit, Row
from performance.apart import alone
from performance.turns import in_turns, shares

__all__ = ["rows"]

SIZES = (  # queries, points, numbers of a point
    (10_000, 60_000, 64),
    (10_000, 60_000, 784),
    (65_536, 8_000, 40),
    (1_000, 500_000, 64),
)
ONE = (8_000, 40)  # points that a single query is compared with
MANY = 200  # single queries that are timed together
FAISS, SKLEARN = "faiss IndexFlatL2", "scikit-learn NearestNeighbors"
MEMORY = SIZES[0]


def rows(repeats: int, small: bool) -> list[Row]:
    found = []
    for queries, points, numbers in SIZES:
        sizes = (queries // 10, points // 10, numbers) if small else (queries, points, numbers)
        ways = {who: prepare(who, *sizes) for who in ("ours", FAISS, SKLEARN)}
        seconds = in_turns(ways, repeats)
        differ = int((ways["ours"]() != ways[FAISS]()).sum())
        name = f"{sizes[0]:,} queries, {sizes[1]:,} points × {numbers}"
        told = {"profile": shares(ways["ours"]), "note": f"{differ} neighbours of {sizes[0]:,} differ from faiss's"}
        found += [
            Row(name, "s", seconds["ours"], FAISS, seconds[FAISS], Limit(1.1), **told),
            Row(name, "s", seconds["ours"], SKLEARN, seconds[SKLEARN], AS_FAST),
        ]
    return [*found, *single(repeats), *memory(repeats, small)]


def single(repeats: int) -> list[Row]:
    """One query at a time; ours may take 0.1 ms more."""
    ways = {who: prepare_single(who) for who in ("ours", FAISS)}
    each = {who: [1000 * value / MANY for value in own] for who, own in in_turns(ways, repeats).items()}
    beyond = [ours - theirs for ours, theirs in zip(each["ours"], each[FAISS], strict=True)]
    name = f"one query, {ONE[0]:,} points × {ONE[1]}"
    return [
        Row(name, "ms", each["ours"], FAISS, each[FAISS], note="the limit is the difference, in the next row"),
        Row(f"{name}: beyond faiss", "ms", beyond, limit=Limit(0.1, "ours"), profile=shares(ways["ours"])),
    ]


def memory(repeats: int, small: bool) -> list[Row]:
    """Of index and search, beside points and queries."""
    sizes = (1_000, 6_000, 64) if small else MEMORY
    peaks = {who: [alone(prepare_alone, who, *sizes).peak for _ in range(repeats)] for who in ("ours", FAISS, SKLEARN)}
    name = f"memory of index and search, {sizes[0]:,} queries, {sizes[1]:,} points × {sizes[2]}"
    return [Row(name, "MiB", peaks["ours"], peer, peaks[peer], AS_FAST) for peer in (FAISS, SKLEARN)]


def prepare(who: str, queries: int, points: int, numbers: int) -> Callable[[], np.ndarray]:
    """A way from points and queries to indices (N,); the index is built before."""
    train, new = made(points, numbers, 0), made(queries, numbers, 1)
    search = index(who, train)
    return lambda: search(new)


def prepare_single(who: str) -> Callable[[], None]:
    search, new = index(who, made(*ONE, 0)), made(MANY, ONE[1], 1)

    def run() -> None:
        for row in range(MANY):
            search(new[row : row + 1])

    return run


def prepare_alone(who: str, queries: int, points: int, numbers: int) -> Callable[[], int]:
    """Index and search, everything loaded before."""
    prepare(who, 10, 100, numbers)()
    train, new = made(points, numbers, 0), made(queries, numbers, 1)
    return lambda: int(index(who, train)(new).sum())


def index(who: str, points: torch.Tensor) -> Callable[[torch.Tensor], np.ndarray]:
    """From queries (N, P) to their nearest point."""
    if who == "ours":
        own = TorchIndex(points)
        return lambda new: own.query(new, 1)[1][:, 0].numpy()
    if who == FAISS:
        flat = faiss.IndexFlatL2(points.shape[1])
        flat.add(points.numpy())
        return lambda new: flat.search(new.numpy(), 1)[1][:, 0]
    brute = NearestNeighbors(n_neighbors=1, algorithm="brute", n_jobs=-1).fit(points.numpy())
    return lambda new: brute.kneighbors(new.numpy(), return_distance=False)[:, 0]


def made(count: int, numbers: int, seed: int) -> torch.Tensor:
    return torch.randn(count, numbers, generator=torch.Generator().manual_seed(seed))
