"""What was tried, and what failed."""

from __future__ import annotations


class Tally:
    """Counts; a failure is a line that says what and where."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.tried = 0
        self.failed: list[str] = []

    def check(self, is_right: bool, what: str) -> None:
        """Count one thing that was tried."""
        self.tried += 1
        if not is_right:
            self.failed.append(f"{self.part}: {' '.join(what.split())[:500]}")
