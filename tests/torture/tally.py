"""What was tried, what failed, and what could not be tried."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    """Counts; a failure is a line that says what and where.

    Attributes:
        part: whose it is.
        tried: things.
        failed: a line for each that did.
        skipped: things that could not be tried here, by the reason.
        measured: numbers that were judged, by name; of several pieces the largest is told.
    """

    part: str
    tried: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    measured: dict[str, float] = field(default_factory=dict)

    def check(self, is_right: bool, what: str) -> None:
        """Count one thing that was tried."""
        self.tried += 1
        if not is_right:
            self.failed.append(f"{self.part}: {' '.join(what.split())[:500]}")

    def skip(self, why: str, count: int = 1) -> None:
        """Count what cannot be tried here, as it needs what is not there; it is neither tried nor failed."""
        self.skipped[why] += count
