"""Batches answered by several threads while others are read and written: in their order, in bounded memory.

reader ──batch──► workers: encoded rows to columns ──in order──► whoever asks, as a rule a writer
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import Queue
from threading import Event, Semaphore, Thread
from typing import NamedTuple, TypeVar

import torch

from dapcal.models.columns import Columns
from dapcal.models.model import Batch, Model, Source
from dapcal.records import ALPHA, LEVEL

MOST_WORKERS = 8  # more share the threads of these: each holds a batch, and what a prediction takes for it
_WORTH = 8192  # inputs for which a thread is worth having: a batch of a table
_SPARE = 2  # batches that are read and not yet begun, or answered and not yet taken

Given = TypeVar("Given")
Found = TypeVar("Found")


class Answered(NamedTuple):
    """A batch, and what the model says of it."""

    batch: Batch
    columns: Columns


def answered(model: Model, source: Source, *, level: float = LEVEL, alpha: float = ALPHA) -> Iterator[Answered]:
    """Every batch of a source with its predictions, in the source's order.

    Of a model whose steps are short (`Model.side_by_side`), as many threads answer as torch would use for one step,
    each a batch of its own, so that no core waits for another. Memory: for every one of them a batch and what
    predicting it takes, and two batches more.

    Args:
        model: what predicts.
        source: what it read.
        level: probability that an interval holds the target.
        alpha: inputs with a p-value up to this are out of distribution.
    """

    def answer(batch: Batch) -> Answered:
        return Answered(batch, model.columns(batch.x, level=level, alpha=alpha))

    threads = torch.get_num_threads()
    expected = math.inf if source.total is None else math.ceil(source.total / _WORTH)
    workers = max(1, int(min(threads, MOST_WORKERS, expected))) if model.side_by_side else 1
    with _threads(max(1, threads // workers)):
        yield from in_order(answer, source.batches, workers)


def in_order(function: Callable[[Given], Found], items: Iterable[Given], workers: int) -> Iterator[Found]:
    """Results of a function in the order of what it was given, by so many threads; one more takes what comes next.

    What either raises is raised here, after the results before it. Whoever asks for no more, or is interrupted, leaves
    no thread behind.
    """
    coming: Queue[Future[Found] | None] = Queue()
    room, ended = Semaphore(workers + _SPARE), Event()

    def read(pool: ThreadPoolExecutor) -> None:
        try:
            for item in items:
                room.acquire()
                if ended.is_set():
                    return
                coming.put(pool.submit(function, item))
        except BaseException as error:
            failed: Future[Found] = Future()
            failed.set_exception(error)
            coming.put(failed)
        finally:
            coming.put(None)

    with ThreadPoolExecutor(workers, thread_name_prefix="answer") as pool:
        reader = Thread(target=read, args=(pool,), name="read", daemon=True)
        reader.start()
        try:
            while (found := coming.get()) is not None:
                yield found.result()
                room.release()
        finally:
            ended.set()
            room.release()
            pool.shutdown(wait=False, cancel_futures=True)
            reader.join()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """That torch uses for one operation, for the time being."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
