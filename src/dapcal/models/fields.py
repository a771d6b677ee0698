"""What a model predicts, and what it predicts from, as a service asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from dapcal.likelihoods import Task

__all__ = ["Field", "Kind", "Task"]

Kind = Literal["number", "category", "array"]

_WORDS = (("false", "true"), ("no", "yes"))


@dataclass(frozen=True)
class Field:
    """One column of a row.

    Args:
        name: any text.
        kind: a finite number, a text, or nested lists of finite numbers.
        levels: of a category, those seen in training; another one is accepted, and is for the model to judge.
        shape: of an array, its lengths from the outside in.
        required: whether a row must have the field; where not, null and a missing key both mean "unknown".
        bounds: of a number, the smallest and the largest that the model takes.
        nullable: whether the value of a required field may be null, which means "unknown".
    """

    name: str
    kind: Kind
    levels: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    required: bool = True
    bounds: tuple[float, float] | None = None
    nullable: bool = False

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

    @property
    def words(self) -> tuple[str, str] | None:
        """What false and true are called among the levels of a category, as training rows spelt it; None: neither is.

        >>> Field("parking", "category", levels=("Yes", "No")).words
        ('No', 'Yes')
        """
        spelt = {level.lower(): level for level in self.levels}
        for false, true in _WORDS:
            if false in spelt or true in spelt:
                return spelt.get(false, false), spelt.get(true, true)
        return None
