"""Rows of many requests predicted together: one call on ten rows costs little more than one on one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

Row = dict[str, Any]
Record = TypeVar("Record")


class Batcher(Generic[Record]):
    """Predicts in one thread; what arrives while it is busy goes into its next call.

    Args:
        predict: rows -> as many records.
        size: the most rows of one call.
    """

    def __init__(self, predict: Callable[[list[Row]], list[Record]], size: int) -> None:
        self._predict = predict
        self._size = size
        self._waiting: deque[_Job[Record]] = deque()
        self._is_busy = False
        self._lock = Lock()  # of these two
        self._thread: ThreadPoolExecutor | None = None

    async def __call__(self, rows: Sequence[Row]) -> list[Record | Exception]:
        """One record for every row, or the exception that this row alone leads to."""
        thread = self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="predict")
        loop = asyncio.get_running_loop()
        pieces = [list(rows[start : start + self._size]) for start in range(0, len(rows), self._size)]
        jobs = [_Job[Record](piece, loop, loop.create_future()) for piece in pieces]
        with self._lock:
            self._waiting.extend(jobs)
            was_busy, self._is_busy = self._is_busy, True
        if not was_busy:
            thread.submit(self._work)
        if len(jobs) == 1:
            return await jobs[0].answer
        answers = await asyncio.gather(*(job.answer for job in jobs))
        return [outcome for answer in answers for outcome in answer]

    def close(self) -> None:
        """Finish what is waiting, then end the thread; a later row starts another one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()

    def _work(self) -> None:
        """Predict for the jobs that wait, call by call, until none does."""
        while jobs := self._next():
            outcomes = iter(self._outcomes([row for job in jobs for row in job.rows]))
            answers = [(job, [next(outcomes) for _ in job.rows]) for job in jobs]
            for loop, own in groupby(answers, lambda answer: answer[0].loop):
                with suppress(RuntimeError):  # it is closed, and nobody waits
                    loop.call_soon_threadsafe(_deliver, list(own))  # one wake-up for all of them

    def _next(self) -> list[_Job[Record]]:
        """Jobs for one call; none where none wait."""
        jobs: list[_Job[Record]] = []
        space = self._size
        with self._lock:
            while self._waiting and len(self._waiting[0].rows) <= space:
                job = self._waiting.popleft()
                if not job.answer.done():  # nobody waits for a cancelled one
                    jobs.append(job)
                    space -= len(job.rows)
            self._is_busy = bool(jobs)
        return jobs

    def _outcomes(self, rows: list[Row]) -> list[Record | Exception]:
        """Records, or exceptions; where a call fails, its halves are tried, so that a bad row fails alone."""
        try:
            records = self._predict(rows)
            if len(records) != len(rows):
                raise RuntimeError(f"Expected {len(rows)} records of `predict`, one for each row, got {len(records)}")
            return list(records)
        except Exception as error:
            if len(rows) == 1:
                return [error]
        middle = len(rows) // 2
        return self._outcomes(rows[:middle]) + self._outcomes(rows[middle:])


class _Job(NamedTuple, Generic[Record]):
    rows: list[Row]
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[list[Record | Exception]]


def _deliver(answers: list[tuple[_Job[Record], list[Record | Exception]]]) -> None:
    for job, outcomes in answers:
        if not job.answer.done():
            job.answer.set_result(outcomes)
