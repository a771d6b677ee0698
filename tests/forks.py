"""Programs in a fork of this process, which has imported everything: a fresh one spends two seconds on that."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TextIO

from dapcal.cli import main

LIMIT = 4096  # of a process's files, those of a program beyond its three streams are closed


class Fork(NamedTuple):
    """A program at work; what it prints can be read."""

    pid: int
    stdout: TextIO
    stderr: TextIO

    def ended(self, seconds: float = 60) -> int:
        """Its exit code, negative where a signal killed it; it must end within these seconds."""
        until = time.monotonic() + seconds
        while not (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            assert time.monotonic() < until, "waited in vain for its end"
            time.sleep(0.01)
        return os.waitstatus_to_exitcode(found[1])


@contextmanager
def forked(program: Callable[[], object]) -> Iterator[Fork]:
    """A function as a program: its exit code is that of `sys.exit`, it hears Ctrl-C, and is killed after the block."""
    (out, own_out), (err, own_err) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        _run(program, own_out, own_err)
    os.close(own_out), os.close(own_err)
    with os.fdopen(out, encoding="utf-8") as stdout, os.fdopen(err, encoding="utf-8") as stderr:
        try:
            yield Fork(pid, stdout, stderr)
        finally:
            with contextlib.suppress(ChildProcessError):  # it has ended and was waited for
                if not os.waitpid(pid, os.WNOHANG)[0]:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)


def command(*words: object) -> Callable[[], None]:
    """`dapcal` with these words as a program."""

    def program() -> None:
        sys.argv = ["dapcal", *map(str, words)]
        main()

    return program


def _run(program: Callable[[], object], out: int, err: int) -> None:
    code = 1
    try:
        gc.freeze()  # files of this process that are collected would close new ones of the same number
        os.dup2(out, 1), os.dup2(err, 2)
        os.closerange(3, LIMIT)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
        logging.getLogger().handlers.clear()  # pytest's, and its warnings that are errors
        warnings.resetwarnings()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        program()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()  # as Python does at its end
        except OSError:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)
