"""What is served: the columns of a row, and a function from rows to records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, get_args

from dapcal.models import Model
from dapcal.models.columns import Columns
from dapcal.models.fields import Field, Task
from dapcal.records import ALPHA, LEVEL

__all__ = ["Field", "Limits", "Served", "Task"]


@dataclass(frozen=True, eq=False)
class Served:
    """A model as the service sees it.

    A record holds `prediction`, `epistemic`, `aleatoric`, `distance`, `ood_p_value`, `ood` (a bool), `reason` (a text,
    "" where `ood` is false; may be left out), and `probabilities` ({class: number}) in classification or `interval`
    ({"lower", "upper", "level"}) in regression; of a table also `missing` (columns) and `unusual` ({column: why}).

    Args:
        name: what the service says it serves.
        task: what kind of records come out.
        fields: the columns.
        classes: names of the classes, in classification.
        predict: rows ({column: value, None where unknown}, every column there) -> one record of plain Python values
            per row. Called from one thread, never twice at a time. A ValueError for a row alone is told to the client
            as what is wrong with that row; any other exception is a failure of the service.
        notes: rows as they were sent -> what there is to know of them, in words: values that are missing, fields that
            are not read, of many rows columns that differ as a whole. Called from any thread, of several rows while
            others are predicted.
    """

    name: str
    task: Task
    fields: tuple[Field, ...]
    classes: tuple[str, ...]
    predict: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
    notes: Callable[[list[dict[str, Any]]], list[str]] = lambda _: []

    def __post_init__(self) -> None:
        if self.task not in get_args(Task):
            raise ValueError(f"Expected `task` as one of {', '.join(get_args(Task))}, got {self.task!r}")
        if (self.task == "classification") != bool(self.classes):
            raise ValueError(f"Expected `classes` in classification alone, got {self.classes} in {self.task}")
        if not self.fields:
            raise ValueError("Expected at least one field, got none; a row needs something to predict from")
        for what, names in (("fields", [field.name for field in self.fields]), ("classes", list(self.classes))):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"Expected different names for all {what}, got {twice} more than once")

    @classmethod
    def of(cls, model: Model, name: str, *, alpha: float = ALPHA, level: float = LEVEL) -> Served:
        """A model of a table or a network as the service sees it.

        Args:
            model: what predicts.
            name: what the service says it serves.
            alpha: rows with a p-value up to this are out of distribution.
            level: of the intervals.
        """

        def predict(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
            columns = model.columns(model.encode(rows), level=level, alpha=alpha)
            return [_record(columns, place, model.classes, level) for place in range(len(rows))]

        return cls(name, model.task, model.fields(), model.classes, predict, model.notes_on)


@dataclass(frozen=True)
class Limits:
    """What the service refuses.

    Args:
        body_bytes: the largest body of a request.
        rows: the most rows of one batch.
        waiting: requests for predictions that are under way at a time; their bodies are what memory is needed for.
        seconds: from the head of a request to its answer, its body included.
        rows_at_once: the most rows of several requests that are predicted together.
        body_seconds: for a body to arrive.
        head_seconds: for a head to arrive, and a TLS handshake.
        idle_seconds: that a connection is kept without a request. Most clients and proxies close earlier, so that none
            writes to what was just closed.
        connections: open at a time; fewer where the process may not open as many files.
    """

    body_bytes: int = 2 * 2**20
    rows: int = 1000
    waiting: int = 512
    seconds: float = 30.0
    rows_at_once: int = 512
    body_seconds: float = 15.0
    head_seconds: float = 10.0
    idle_seconds: float = 75.0
    connections: int = 1000

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"Expected `{name}` > 0, got {value}")


def _record(columns: Columns, place: int, classes: tuple[str, ...], level: float) -> dict[str, Any]:
    """What the columns say of one row, in plain Python values."""
    row = {name: values[place] for name, values in columns.items()}
    names = ("epistemic", "aleatoric", "distance", "ood_p_value", "ood")
    record = {name: row[name].reshape(()).item() for name in names} | {"reason": row["reason"]}
    record |= {name: row[name] for name in ("missing", "unusual") if name in row}
    if classes:
        probabilities = dict(zip(classes, row["probability"].tolist(), strict=True))
        return {**record, "prediction": row["prediction"], "probabilities": probabilities}
    mean, lower, upper = (float(row[name].reshape(())) for name in ("prediction", "lower", "upper"))
    return {**record, "prediction": mean, "interval": {"lower": lower, "upper": upper, "level": level}}
