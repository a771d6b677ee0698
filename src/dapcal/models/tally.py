"""What the predictions for a file come to: flags and their reasons, columns behind them, quality and drift, in words.

Batches are counted where they are predicted (`counted`), and summed in their order where the words are made.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from dapcal.models import drift
from dapcal.models.against_targets import Judge, words
from dapcal.models.columns import Columns
from dapcal.models.drift import Sample
from dapcal.models.model import Model
from dapcal.models.table import TableModel

_SHOWN = 8  # columns


class Counted(NamedTuple):
    """One batch: rows, those that are flagged, why, and the columns behind it, each with what is unusual."""

    rows: int
    flagged: int
    reasons: Counter[str]
    behind: Counter[str]


def counted(columns: Columns) -> Counted:
    """Count the predictions of one batch."""
    behind = Counter(f"`{name}` ({what})" for row in columns.get("unusual", ()) for name, what in row.items())
    reasons = Counter(filter(None, columns["reason"]))
    return Counted(len(columns["ood"]), int(columns["ood"].sum()), reasons, behind)


class Tally:
    """Sums over batches, in bounded memory."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.rows = self.flagged = 0
        self.reasons: Counter[str] = Counter()
        self.behind: Counter[str] = Counter()
        self.sample = Sample()
        self.judge = Judge(model) if isinstance(model, TableModel) else None

    def add(self, found: Counted, columns: Columns, targets: Any) -> None:
        """The next batch; of its columns those that targets are compared with."""
        self.rows, self.flagged = self.rows + found.rows, self.flagged + found.flagged
        self.reasons.update(found.reasons)
        self.behind.update(found.behind)
        if self.judge is not None:
            self.judge.add(columns, targets)

    def add_inputs(self, x: Tensor) -> None:
        """Its inputs (N, ...), some of which are compared with training."""
        self.sample.add(x)

    def problem(self) -> str | None:
        """Why the targets were not looked at."""
        return None if self.judge is None else self.judge.problem

    def told(self, out: str | Path, noun: str, alpha: float, level: float) -> tuple[dict[str, Any], str]:
        """The outcome as data and in words."""
        share = f"{self.flagged:,} of {self.rows:,} {noun} ({100 * self.flagged / self.rows:.1f} %)"
        lines = [f"{share} are flagged as out of distribution"]
        lines += [f"  {count:,} {reason}" for reason, count in self.reasons.most_common()]
        found: dict[str, Any] = {"file": str(out), noun: self.rows, "ood": self.flagged, "reasons": dict(self.reasons)}
        found["alpha"] = alpha
        if self.behind:
            behind = self.behind.most_common()
            found["unusual"] = dict(behind)
            lines.append("Columns behind flags: " + ", ".join(f"{name} {count:,}" for name, count in behind[:_SHOWN]))
        if self.judge is not None and isinstance(self.model, TableModel):
            encoder = self.model.encoder
            if (quality := self.judge.found()) is not None:
                found["quality"] = asdict(quality)
                lines.append(words(quality, encoder.target, level))
            moved = self.model.drifts(self.sample())
            found["drift"] = [one._asdict() for one in moved]
            lines += drift.words(moved)
        return found, "\n".join([*lines, f"Saved to {out}"])
