"""Several processes that answer at one address: the system hands every connection to one that is free.

One process opens the address and watches over the others, which take connections from it and have a model each. A
SIGTERM, SIGINT or SIGHUP reaches all of them; one that ends by itself is replaced; when the first is gone, all end.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from multiprocessing.context import SpawnProcess
from pathlib import Path
from socket import socket

from dapcal.serve.access import AccessLog
from dapcal.serve.metrics import FOLDER, Metrics
from dapcal.serve.process import address, listening, signals
from dapcal.serve.served import Limits, Served
from dapcal.serve.server import Security, Server

logger = logging.getLogger(__name__)

_READY = "ready"
_SPAWN = get_context("spawn")  # a fork would share locks that threads of the first hold


@dataclass(frozen=True)
class Work:
    """What every process is told.

    Attributes:
        load: gives the model, at the start and on SIGHUP; a function or object that can be pickled.
        limits: of each process by itself.
        security: token and TLS.
        access: where the access log goes; None: nowhere.
    """

    load: Callable[[], Served]
    limits: Limits = field(default_factory=Limits)
    security: Security = field(default_factory=Security)
    access: Callable[[], AccessLog] | None = None


def run_several(
    work: Work, workers: int, host: str = "127.0.0.1", port: int = 8000, started: Callable[[str], None] | None = None
) -> None:
    """Serve by so many processes until SIGTERM, after which it returns, or Ctrl-C (KeyboardInterrupt).

    Requests that are under way are finished first. /metrics counts what all of them did; /health and /ready are of the
    one that answers.

    Args:
        work: model and limits.
        workers: processes beside this one.
        host: the address to listen at.
        port: 0 takes one that is free.
        started: called with the service's address as soon as all of them are ready.
    """
    if workers < 1:
        raise ValueError(f"Expected `workers` of at least 1, got {workers}")
    with (
        listening(host, port) as listener,
        tempfile.TemporaryDirectory(prefix="dapcal-metrics-") as folder,
        _bell() as bell,
    ):
        watch = _Watch(work, listener, Path(folder))
        try:
            for _ in range(workers):
                watch.start()
            while watch.waits_for(workers):
                watch.look(bell)
            if started is not None and not watch.is_ending:
                started(address(host, listener, work.security))
            while not watch.is_ending:
                watch.look(bell)
        finally:
            watch.end()
        if watch.is_interrupted:
            raise KeyboardInterrupt


class _Watch:
    """The processes, and what is to be done about them."""

    def __init__(self, work: Work, listener: socket, folder: Path) -> None:
        self._work, self._listener, self._folder = work, listener, folder
        self._starting: dict[SpawnProcess, connection.Connection] = {}
        self._ready: dict[SpawnProcess, connection.Connection] = {}
        self._stale: set[SpawnProcess] = set()  # were told to load again while they loaded
        self.is_ending = self.is_interrupted = False

    def start(self) -> None:
        """One more; until it serves, signals reach it through us alone."""
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_serve, args=(self._work, self._listener, theirs), name="dapcal-serve")
        with _ignored(signal.SIGINT), _ignored(signal.SIGHUP), _environment(FOLDER, str(self._folder)):
            process.start()
        theirs.close()
        self._starting[process] = ours

    def waits_for(self, workers: int) -> bool:
        """Whether some are not ready yet."""
        return not self.is_ending and len(self._ready) < workers

    def look(self, bell: connection.Connection) -> None:
        """Wait until something happens, and see to it."""
        processes = {process.sentinel: process for process in (*self._starting, *self._ready)}
        pipes = {pipe: process for process, pipe in self._starting.items()}
        for found in connection.wait([bell, *pipes, *processes]):
            if found is bell:
                self._told(bell.recv())
            elif found in pipes and pipes[found] in self._starting:
                with suppress(EOFError, OSError):  # it has ended, which its sentinel says too
                    found.recv()
                    self._begins(pipes[found])
            elif found in processes:
                self._ended(processes[found])

    def end(self) -> None:
        """Have all of them finish, and wait for it."""
        for process in (*self._starting, *self._ready):
            process.terminate()
        for process in (*self._starting, *self._ready):
            process.join(self._work.limits.seconds + 10)
            if process.is_alive():
                process.kill()
                process.join()

    def _begins(self, process: SpawnProcess) -> None:
        self._ready[process] = self._starting.pop(process)
        if process in self._stale:
            self._stale.remove(process)
            _send(process, signal.SIGHUP)

    def _told(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._stale.update(self._starting)
            for process in self._ready:
                _send(process, number)
        else:
            self.is_ending, self.is_interrupted = True, number == signal.SIGINT

    def _ended(self, process: SpawnProcess) -> None:
        process.join()
        if self._starting.pop(process, None) is not None:
            raise RuntimeError(
                f"A process of the service ended before it was ready (exit code {process.exitcode}); it says why above"
            )
        if self._ready.pop(process, None) is not None:
            logger.error("A process of the service ended (exit code %s); another takes its place", process.exitcode)
            self.start()


def _serve(work: Work, listener: socket, pipe: connection.Connection) -> None:
    """What a process does."""
    threading.Thread(target=_end_without, args=(pipe,), daemon=True).start()
    access = None if work.access is None else work.access()
    metrics = Metrics(Path(os.environ[FOLDER]))
    server = Server(work.load(), work.limits, work.security, access, work.load, metrics)
    with signals(server):
        pipe.send(_READY)
        server.run(sockets=[listener])


def _end_without(pipe: connection.Connection) -> None:
    """End when the first process is gone, however it went."""
    with suppress(EOFError, OSError):
        pipe.recv()
    os.kill(os.getpid(), signal.SIGTERM)


def _send(process: SpawnProcess, number: int) -> None:
    with suppress(ProcessLookupError):
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, number)


@contextmanager
def _bell() -> Iterator[connection.Connection]:
    """Rings with the number of every signal that comes meanwhile."""
    listens, rings = _SPAWN.Pipe(duplex=False)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: rings.send(number)) for number in numbers}
    try:
        yield listens
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        listens.close()
        rings.close()


@contextmanager
def _ignored(number: signal.Signals) -> Iterator[None]:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
