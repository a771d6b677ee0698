"""What is told of work on the way: the type of a callback of stages, and a bar for the epochs of a training."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TextIO


class Epoch(NamedTuple):
    """What is known after an epoch."""

    number: int  # from 1
    total: int
    loss: float  # mean over the training inputs
    held_out_nll: float | None


Progress = Callable[[Epoch], None]
"""Told of every epoch of a training."""

Stages = Callable[[str, int, int | None], None]
"""Told a stage's name, the steps of it that are done, and their number, or None where it is not known."""

_PAUSE = 0.1  # seconds between two drawings: an epoch of a small network is shorter than a drawing


class Bar:
    """Call it with every epoch. On a terminal a bar is drawn; elsewhere every tenth of the way, and the end, is a line.

    Args:
        label: what is being trained.
        stream: where to write; by default standard error.
    """

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        try:
            from rich import progress
            from rich.console import Console
        except ImportError as error:
            raise ImportError(
                "A progress bar needs rich; install it with: pip install 'dapcal[progress]', or pass a function as "
                "`progress` in place of True"
            ) from error
        self.stream = sys.stderr if stream is None else stream
        console = Console(file=self.stream)
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[scores]}", markup=False),
            progress.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
            auto_refresh=False,  # by a thread, which data loaders that fork would not survive
            redirect_stdout=False,  # what a script prints is its own
            redirect_stderr=False,
        )
        self._task = self._bar.add_task(label, total=None, scores="")
        self._draws = self.stream.isatty() and console.is_interactive
        self._drawn = -_PAUSE
        self._news = False

    def __call__(self, epoch: Epoch) -> None:
        """Show an epoch."""
        nll = "" if epoch.held_out_nll is None else f"  held-out NLL {epoch.held_out_nll:.4f}"
        scores = f"loss {epoch.loss:.4f}{nll}"
        self._bar.update(self._task, completed=epoch.number, total=epoch.total, scores=scores)
        self._news = True
        if epoch.number == epoch.total:
            self.end()
        elif self._is_due(epoch):
            self._show()

    def end(self) -> None:
        """Show the last epoch, if it is not shown yet, and leave the terminal as it was; a second call does nothing."""
        if self._news:
            self._show()
        if self._draws:
            self._bar.stop()

    def _is_due(self, epoch: Epoch) -> bool:
        if self._draws:
            return time.monotonic() - self._drawn >= _PAUSE
        return epoch.number * 10 // epoch.total != (epoch.number - 1) * 10 // epoch.total

    def _show(self) -> None:
        self._news = False
        if self._draws:
            self._bar.start()
            self._bar.refresh()
            self._drawn = time.monotonic()
            return
        task = self._bar.tasks[0]
        left = "" if task.time_remaining is None else f"  {_minutes(task.time_remaining)} left"
        self.stream.write(f"{task.description} {task.completed}/{task.total}  {task.fields['scores']}{left}\n")


@contextmanager
def told(progress: Progress | bool, label: str) -> Iterator[Progress | None]:
    """Whom a training tells of its epochs: a function, or for True a bar, which ends however the training ends."""
    listener = Bar(label) if progress is True else progress or None
    try:
        yield listener
    finally:
        if isinstance(listener, Bar):
            listener.end()


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
