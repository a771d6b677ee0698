"""Rows of many requests predicted together: one call on ten rows costs little more than one on one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
        self._thread: ThreadPoolExecutor | None = None

    async def __call__(self, rows: Sequence[Row]) -> list[Record | Exception]:
        """One record for every row, or the exception that this row alone leads to."""
        thread = self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="predict")
        pieces = [list(rows[start : start + self._size]) for start in range(0, len(rows), self._size)]
        jobs = [_Job[Record](piece, Future()) for piece in pieces]
        for job in jobs:
            self._waiting.append(job)
            thread.submit(self._next)
        answers = await asyncio.gather(*(asyncio.wrap_future(job.answer) for job in jobs))
        return [outcome for answer in answers for outcome in answer]

    def close(self) -> None:
        """Finish what is waiting, then end the thread; a later row starts another one."""
        if self._thread is not None:
            self._thread.shutdown()
        self._thread = None

    def _next(self) -> None:
        """Predict for the jobs that wait. Every job asks for this, so most calls find theirs done already."""
        jobs: list[_Job[Record]] = []
        space = self._size
        while self._waiting and len(self._waiting[0].rows) <= space:
            job = self._waiting.popleft()
            if job.answer.set_running_or_notify_cancel():  # nobody waits for a cancelled one
                jobs.append(job)
                space -= len(job.rows)
        if not jobs:
            return
        outcomes = iter(self._outcomes([row for job in jobs for row in job.rows]))
        for job in jobs:
            job.answer.set_result([next(outcomes) for _ in job.rows])

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
    answer: Future[list[Record | Exception]]
