"""The nearest neighbour, exactly, beside faiss and scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from neighbors import INDEXES, SIZES, Search, normal
from torch import Tensor

from dapcal.distances import TorchIndex
from dapcal.experiments.performance import AS_FAST, Limit, Row
from performance.apart import peaks
from performance.turns import in_turns, shares

__all__ = ["rows"]

*MANY, ONE = SIZES  # the last has one query
ROUNDS = 200  # single queries that are timed together
PEERS = {"faiss": "faiss IndexFlatL2", "sklearn": "scikit-learn NearestNeighbors"}
TORCH, NEVER_SLOWER = "ours where faiss is not installed", Limit(1.05)  # the same steps of many queries, and noise


def rows(repeats: int, small: bool) -> list[Row]:
    found = []
    for queries, points, numbers in MANY:
        sizes = (queries // 10, points // 10, numbers) if small else (queries, points, numbers)
        train, asked = normal(*sizes[1:]), normal(sizes[0], numbers, seed=1)
        ways = {who: partial(build(train), asked) for who, build in INDEXES.items()} | {
            TORCH: partial(without_faiss(train), asked)
        }
        seconds = in_turns(ways, repeats)
        differ = int((ways["dapcal"]() != ways["faiss"]()).sum())
        name = f"{sizes[0]:,} queries, {sizes[1]:,} points × {numbers}"
        profile, note = shares(ways["dapcal"]), f"{differ} neighbours of {sizes[0]:,} differ from faiss's"
        found += [
            Row(name, "s", seconds["dapcal"], PEERS["faiss"], seconds["faiss"], Limit(1.1), note, profile),
            Row(name, "s", seconds["dapcal"], PEERS["sklearn"], seconds["sklearn"], AS_FAST, profile=profile),
            Row(name, "s", seconds["dapcal"], TORCH, seconds[TORCH], NEVER_SLOWER, profile=profile),
        ]
    return [*found, *single(repeats), *memory(repeats, small)]


def single(repeats: int) -> list[Row]:
    """One query at a time; ours may take 0.1 ms more."""
    _, points, numbers = ONE
    train, asked = normal(points, numbers), normal(ROUNDS, numbers, seed=1)
    searches = {who: INDEXES[who](train) for who in ("dapcal", "faiss")} | {TORCH: without_faiss(train)}
    ways = {who: _one_by_one(search, asked) for who, search in searches.items()}
    each = {who: [1000 * value / ROUNDS for value in own] for who, own in in_turns(ways, repeats).items()}
    beyond = [ours - theirs for ours, theirs in zip(each["dapcal"], each["faiss"], strict=True)]
    name, note = f"one query, {points:,} points × {numbers}", "the limit is the difference, in the next row"
    return [
        Row(name, "ms", each["dapcal"], PEERS["faiss"], each["faiss"], note=note),
        Row(f"{name}: beyond faiss", "ms", beyond, limit=Limit(0.1, "ours"), profile=shares(ways["dapcal"])),
        Row(name, "ms", each["dapcal"], TORCH, each[TORCH], NEVER_SLOWER),
    ]


def without_faiss(points: Tensor) -> Search:
    """Our exact search by torch alone."""
    index = TorchIndex(points)
    index.__dict__["_array"] = None  # what faiss would search
    return lambda asked: index.query(asked, 1)[1][:, 0].numpy()


def memory(repeats: int, small: bool) -> list[Row]:
    """Of index and search, beside points and queries."""
    sizes = (1_000, 6_000, 64) if small else SIZES[0]
    found = {who: peaks(repeats, prepare, who, *sizes) for who in INDEXES}
    name = f"memory of index and search, {sizes[0]:,} queries, {sizes[1]:,} points × {sizes[2]}"
    return [Row(name, "MiB", found["dapcal"], peer, found[who], AS_FAST) for who, peer in PEERS.items()]


def prepare(who: str, queries: int, points: int, numbers: int) -> Callable[[], int]:
    """Index and search, everything loaded before."""
    INDEXES[who](normal(100, numbers))(normal(10, numbers))
    train, asked = normal(points, numbers), normal(queries, numbers, seed=1)
    return lambda: int(INDEXES[who](train)(asked).sum())


def _one_by_one(search: Search, asked: Tensor) -> Callable[[], None]:
    def run() -> None:
        for row in range(ROUNDS):
            search(asked[row : row + 1])

    return run
