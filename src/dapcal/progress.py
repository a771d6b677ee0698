"""A progress bar for training: epochs, loss, held-out NLL and the time left, on one line."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from dapcal.posteriors.training import Epoch

WIDTH = 24


class Bar:
    """Call it with every epoch. On a terminal the line is redrawn; elsewhere every tenth of the way gets a line.

    Args:
        label: what is being trained.
        stream: where to write; by default standard error.
    """

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self.label = label
        self.stream = sys.stderr if stream is None else stream
        self.started = time.monotonic()
        self.first: int | None = None  # a resumed run starts later

    def __call__(self, epoch: Epoch) -> None:
        """Show an epoch."""
        self.first = epoch.number if self.first is None else self.first
        last = epoch.number == epoch.total
        if self.stream.isatty():
            self.stream.write(f"\r{self.line(epoch)}\x1b[K" + ("\n" if last else ""))
            self.stream.flush()
        elif last or epoch.number * 10 // epoch.total != (epoch.number - 1) * 10 // epoch.total:
            self.stream.write(self.line(epoch) + "\n")

    def line(self, epoch: Epoch) -> str:
        """The text of one line."""
        done = int(WIDTH * epoch.number / epoch.total)
        nll = "" if epoch.held_out_nll is None else f"  held-out NLL {epoch.held_out_nll:.4f}"
        per_epoch = (time.monotonic() - self.started) / (epoch.number - (self.first or 1) + 1)
        left = int(per_epoch * (epoch.total - epoch.number))
        bar = "█" * done + "·" * (WIDTH - done)
        return (
            f"{self.label} {bar} {epoch.number}/{epoch.total}  loss {epoch.loss:.4f}{nll}  "
            f"{left // 60}:{left % 60:02d} left"
        )
