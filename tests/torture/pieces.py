"""Pieces of parts as they end, one after the other here or some at a time, each in a process of its own.

They are called by the name of this module, as new processes cannot find what `python -m torture` itself defines.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import NamedTuple

from dapcal.experiments.checkout import commit

SHOWN = 20  # failures of one piece


class Piece(NamedTuple):
    """What one call tried."""

    tried: int
    failed: int
    seconds: int
    commit: str


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
    attempts, failed = importlib.import_module(f"torture.{name}").run(count, seed)
    seconds = round(time.monotonic() - started)
    told = [f"{name}: {count}, seed {seed}", *(f"  FAILED (seed {seed}) {line}" for line in failed[:SHOWN])]
    told.append(f"  {attempts:,} tried, {len(failed)} failed, {seconds:,} s")
    return name, number, Piece(attempts, len(failed), seconds, of), "\n".join(told)
