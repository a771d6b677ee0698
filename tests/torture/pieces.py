"""Pieces of parts as they end, one after the other here or some at a time, each in a process of its own.

They are called by the name of this module, as new processes cannot find what `python -m torture` itself defines.
"""

from __future__ import annotations

import importlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, NamedTuple

from dapcal.experiments.checkout import commit
from torture.tally import Tally

SHOWN = 20  # failures of one piece


class Piece(NamedTuple):
    """What one call tried; files of before end with the commit."""

    tried: int
    failed: int
    seconds: int
    commit: str
    skipped: Sequence[tuple[str, int]] = ()  # why something could not be tried there, and how much
    measured: Sequence[tuple[str, float]] = ()


def summed(pieces: Iterable[Piece]) -> dict[str, Any]:
    """Counts over all of them, of what could not be tried by the reason; and the largest of what was measured."""
    pieces, skipped = list(pieces), Counter[str]()
    for piece in pieces:
        skipped.update(dict(piece.skipped))
    counts = {name: sum(getattr(piece, name) for piece in pieces) for name in ("tried", "failed", "seconds")}
    measured = dict(sorted(one for piece in pieces for one in map(tuple, piece.measured)))  # the largest come last
    return counts | {"skipped": dict(skipped), "measured": measured}


def all_of(asked: list[tuple[str, int, int, int]], jobs: int) -> Iterator[tuple[str, int, Piece, str]]:
    """Every piece as it ends.

    Args:
        asked: part, number of the piece, how much it is asked for, seed.
        jobs: at a time; one needs no other process.

    Returns:
        Part, number, what it tried, and words for it.
    """
    if jobs == 1:
        yield from (tried(*one) for one in asked)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        for done in as_completed([pool.submit(tried, *one) for one in asked]):
            yield done.result()


def tried(name: str, number: int, count: int, seed: int) -> tuple[str, int, Piece, str]:
    """One piece of a part, and what is said of it."""
    started, of = time.monotonic(), commit()
    found: Tally = importlib.import_module(f"torture.{name}").run(count, seed)
    seconds, failed, skipped = round(time.monotonic() - started), len(found.failed), found.skipped
    told = [f"{name}: {count}, seed {seed}", *(f"  FAILED (seed {seed}) {line}" for line in found.failed[:SHOWN])]
    told += [f"  NOT TRIED ({left:,}): {why}" for why, left in skipped.items()]
    told.append(f"  {found.tried:,} tried, {failed} failed, {skipped.total():,} not tried, {seconds:,} s")
    told += [f"  {what}: {most:.4g}" for what, most in found.measured.items()]
    piece = Piece(found.tried, failed, seconds, of, tuple(skipped.items()), tuple(found.measured.items()))
    return name, number, piece, "\n".join(told)
