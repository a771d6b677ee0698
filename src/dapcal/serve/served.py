"""What is served: the columns of a row, and a function from rows to records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

Kind = Literal["number", "category", "array"]
Task = Literal["classification", "regression"]


@dataclass(frozen=True)
class Field:
    """One column of a row.

    Args:
        name: any text.
        kind: a finite number, a text, or nested lists of finite numbers.
        levels: of a category, those seen in training; another one is accepted, and is for the model to judge.
        shape: of an array, its lengths from the outside in.
        required: whether a row must have a value; where not, null and a missing key both mean "unknown".
        bounds: of a number, the smallest and the largest that the model takes.
    """

    name: str
    kind: Kind
    levels: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    required: bool = True
    bounds: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"Expected `kind` as one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        if (self.kind == "array") != bool(self.shape) or any(length < 1 for length in self.shape):
            raise ValueError(
                f"Expected lengths >= 1 in `shape` for an array, and none for others, got {self.shape} for the "
                f"{self.kind} {self.name!r}"
            )
        if self.bounds is not None and (self.kind != "number" or not self.bounds[0] <= self.bounds[1]):
            raise ValueError(f"Expected `bounds` in order, and for a number, got {self.bounds} for {self.name!r}")


@dataclass(frozen=True, eq=False)
class Served:
    """A model as the service sees it.

    A record holds `prediction`, `epistemic`, `aleatoric`, `distance`, `ood_p_value`, `ood` (a bool), and
    `probabilities` ({class: number}) in classification or `interval` ({"lower", "upper", "level"}) in regression.

    Args:
        name: what the service says it serves.
        task: what kind of records come out.
        fields: the columns.
        classes: names of the classes, in classification.
        predict: rows ({column: value, None where unknown}, every column there) -> one record of plain Python values
            per row. Called from one thread, never twice at a time. A ValueError for a row alone is told to the client
            as what is wrong with that row; any other exception is a failure of the service.
    """

    name: str
    task: Task
    fields: tuple[Field, ...]
    classes: tuple[str, ...]
    predict: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]

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


@dataclass(frozen=True)
class Limits:
    """What the service refuses.

    Args:
        body_bytes: the largest body of a request.
        rows: the most rows of one batch.
        waiting: requests for predictions that are under way at a time; their bodies are what memory is needed for.
        seconds: from the first byte of a request to its answer.
        rows_at_once: the most rows of several requests that are predicted together.
    """

    body_bytes: int = 2 * 2**20
    rows: int = 1000
    waiting: int = 512
    seconds: float = 30.0
    rows_at_once: int = 256

    def __post_init__(self) -> None:
        for name in ("body_bytes", "rows", "waiting", "seconds", "rows_at_once"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Expected `{name}` > 0, got {getattr(self, name)}")
