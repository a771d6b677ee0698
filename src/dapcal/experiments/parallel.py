"""Calls in several processes that end with the one that started them, whatever ends it.

Not joblib (1.6 was tried): 30 s after SIGKILL or SIGTERM to the parent its workers were still busy with their calls,
where ours had ended within 0.6 s. Ctrl-C ends both in 2 to 3 s, and both take as long to start (7 s of processor time
for two processes, nearly all of it imports).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from threading import Thread
from typing import Any

PAUSE = 0.1  # seconds between two looks at what is finished
Submit = Callable[..., Future[Any]]
"""Takes a function and its arguments."""


@contextmanager
def processes(jobs: int, elsewhere: Submit | None = None) -> Iterator[Submit]:
    """Processes that start afresh (a forked torch may hang); for one job calls are done here, at once.

    An error or interrupt inside the block ends the others, and so does the death of this process.

    Args:
        jobs: processes at a time.
        elsewhere: who takes calls in place of processes of this machine, e.g. a cluster.
    """
    if elsewhere is not None:
        yield elsewhere
        return
    if jobs <= 1:
        yield _done_here
        return
    others = active_children()
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_end_with_parent)

    def submit(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        with _interrupts_held():
            return pool.submit(function, *arguments)

    try:
        yield submit
    except BaseException:
        for process in set(active_children()).difference(others):
            process.kill()  # what they write is complete or absent, and SIGTERM is held while they start
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def looks(calls: list[Future[Any]]) -> Iterator[list[Future[Any]]]:
    """The calls that have finished since the last look, maybe none, until there are none left.

    The first error among them is raised at once. `calls` is emptied; what is added to it meanwhile is waited for too.
    """
    while calls:
        finished = [call for call in calls if call.done()]  # `futures.wait` breaks where Ctrl-C meets its locks
        for call in finished:
            call.result()
            calls.remove(call)
        yield finished
        time.sleep(0 if finished else PAUSE)


def _done_here(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(function(*arguments))
    return future


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Signals to end come after the block: a process is started as a whole, and never hears of Ctrl-C itself."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """A process of a pool whose parent was killed would wait for calls for ever."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # held since before this process started

    def watch() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    Thread(target=watch, daemon=True).start()
