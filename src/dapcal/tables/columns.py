"""Columns of a table as the inputs of a network, (N, P) float32, and back.

A number is standardised: (value − mean)/sd of the training rows. Where it is missing it counts as the mean, and a 0/1
column beside it says so. One with a heavy tail counts by its logarithm, too (`dapcal.tables.magnitudes`).

A category is one 0/1 column per level. Two different levels are then √2 apart, as two independent values of a
standardised number are in the root mean square: no column outweighs the others in a distance. The `MAX_LEVELS` most
frequent levels have columns of their own, the rarer ones share one, and missing values are a level.

Missing values have their column even where no training row lacked one: a blank must not look like an ordinary value.
The network has learnt nothing about such a column, so its members disagree there as their prior does.

A level that the training rows never held has a column of its own, which is 0 at all training rows and `UNKNOWN` at such
a value: it lies at √(1 + UNKNOWN²) ≈ 4.1 standard deviations from every level, so that the row counts as far from the
training data, as it should, while the network, which has learnt nothing about that column, is not thrown about.
Of an open column (tickets, streets) new levels are the rule, as many of its levels were seen once: there a new level
counts as one more of the rare ones.

Where levels are too many to have columns of their own, further columns say what the target was in training rows of the
same level (`dapcal.tables.coding`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dapcal.tables.magnitudes import Magnitude
from dapcal.tables.values import numbers, texts
from dapcal.visible import brief

MAX_LEVELS = 50
UNKNOWN = 4.0
LIMIT = 1e6  # standard deviations; squares of squares of it still fit into float32


@dataclass(frozen=True)
class Number:
    """(value − center)/scale, a 0/1 column for missing values, and the magnitude, if the tail is heavy.

    Attributes:
        name: of the column.
        center: mean of the training rows.
        scale: their standard deviation.
        missing: whether training rows had missing values.
        marked: whether there is a 0/1 column for them; in files of earlier versions only where `missing` holds.
        magnitude: of a number with a heavy tail; 0 where the number is missing.
    """

    name: str
    center: float
    scale: float
    missing: bool
    marked: bool = True
    magnitude: Magnitude | None = None

    @property
    def width(self) -> int:
        """Columns of the encoded matrix."""
        return 1 + self.marked + (self.magnitude is not None)

    def encode(self, values: pa.ChunkedArray, part: np.ndarray, first_row: int) -> Counts:
        """Fill `part` (N, width), which holds zeros."""
        with np.errstate(over="ignore"):  # what overflows is too far, and refused
            amounts = numbers(values, self.name, first_row=first_row)
            standardised = (amounts - self.center) / self.scale  # (N,)
        far = np.abs(standardised) > LIMIT
        if far.any():
            row = int(np.argmax(far))
            raise ValueError(
                f"Row {first_row + row}: column `{self.name}` holds {values[row].as_py()}, over a million standard "
                "deviations from the training rows; correct it, or leave it empty if it is missing"
            )
        missing = np.isnan(standardised)
        part[:, 0] = np.where(missing, 0.0, standardised)
        if self.marked:
            part[:, 1] = missing
        if self.magnitude is not None:
            part[:, -1] = np.where(missing, 0.0, self.magnitude(amounts))
        return Counts(0 if self.missing else int(missing.sum()), Counter())

    def decode(self, part: np.ndarray) -> list[str]:
        """Readable values of encoded rows (N, width)."""
        absent = part[:, 1] > 0.5 if self.marked else np.zeros(len(part), bool)
        return [
            "missing" if none else readable(self.center + self.scale * value, self.scale * max(1.0, abs(value)))
            for value, none in zip(part[:, 0].tolist(), absent.tolist(), strict=True)
        ]

    def as_json(self) -> dict[str, Any]:
        """A description that `dapcal.tables.descriptions` reads back exactly."""
        told = {"kind": "number", **asdict(self), "center": self.center.hex(), "scale": self.scale.hex()}
        del told["magnitude"]
        return told if self.magnitude is None else {**told, "magnitude": self.magnitude.as_json()}


@dataclass(frozen=True)
class Category:
    """A 0/1 column per level, one for rare levels if there are any, one for missing values, one for unknown; codes."""

    name: str
    levels: tuple[str, ...]  # most frequent first
    rare: tuple[str, ...]  # seen in training, and encoded as one
    missing: bool  # whether training rows had missing values
    marked: bool = True  # as in `Number`
    open: bool = False  # whether new levels are to be expected, and count as rare ones
    codes: tuple[tuple[float, ...], ...] = ()  # what the target was, for every level, rare ones after the others

    @property
    def width(self) -> int:
        """Columns of the encoded matrix."""
        return self.indicators + (len(self.codes[0]) if self.codes else 0)

    @property
    def indicators(self) -> int:
        """Those of them that say which level it is; they come first."""
        return len(self.levels) + bool(self.rare) + self.marked + (not self.open)

    @property
    def mark(self) -> int | None:
        """The place of the one for missing values."""
        return len(self.levels) + bool(self.rare) if self.marked else None

    def encode(self, values: pa.ChunkedArray, part: np.ndarray, first_row: int) -> Counts:  # noqa: ARG002
        """Fill `part` (N, width), which holds zeros."""
        text = texts(values, self.name)
        missing = text.is_null().to_numpy()
        found = pc.index_in(text, pa.array((*self.levels, *self.rare), pa.string()))
        position = pc.fill_null(found, -1).to_numpy().astype(np.int64)  # (N,)
        unknown = (position < 0) & ~missing
        if self.codes:
            known = position >= 0
            part[known, self.indicators :] = np.array(self.codes, np.float32)[position[known]]
        position = np.minimum(position, len(self.levels))  # rare levels share the column after the others
        # otherwise imputed with the most frequent level
        position[missing] = self.mark or 0
        if self.open:
            position[unknown] = len(self.levels)
            unknown[:] = False
        position[unknown] = self.indicators - 1
        part[np.arange(len(part)), position] = np.where(unknown, UNKNOWN, 1.0)
        levels = text.filter(pa.array(unknown)).to_pylist() if unknown.any() else ()
        return Counts(0 if self.missing else int(missing.sum()), Counter(levels))

    def decode(self, part: np.ndarray) -> list[str]:
        """The level with the largest entry, for encoded rows (N, width); a new one has no name here."""
        shown = [*self.levels, *["other"] * bool(self.rare), *["missing"] * self.marked, *["(new)"] * (not self.open)]
        return [shown[position] for position in part[:, : self.indicators].argmax(1)]

    def as_json(self) -> dict[str, Any]:
        """A description that `dapcal.tables.descriptions` reads back exactly."""
        lists = {"levels": list(self.levels), "rare": list(self.rare), "codes": [list(code) for code in self.codes]}
        return {"kind": "category", **asdict(self), **lists}


class Counts(NamedTuple):
    """Rows of one column that had to be made up for."""

    imputed: int  # rows without a value, where training had none such
    unknown: Counter[str]  # levels that training never saw, and their rows


def find(table: pa.Table, name: str) -> str:
    """The name of a column, if the table has it once; otherwise an error that suggests the nearest."""
    found = len(table.schema.get_all_field_indices(name))
    if found == 1:
        return name
    if found:
        raise ValueError(f"Expected one column `{name}`, got {found}; rename all but one")
    near = nearest(name, table.column_names)
    raise ValueError(
        f"There is no column `{name}`"
        + (f"; did you mean `{near}`?" if near else f"; the columns are: {listed(table.column_names)}")
    )


def listed(names: Sequence[str]) -> str:
    """Names as errors and notes list them, the first ten, and of each its beginning."""
    return ", ".join(map(brief, names[:10])) + (", …" if len(names) > 10 else "") or "none"


def all_of(problems: Mapping[str, str]) -> str:
    """What is wrong with columns, as one message; several are numbered, so that none hides behind another."""
    if len(problems) == 1:
        return f"{next(iter(problems.values()))}; --drop-unusable leaves out whatever cannot be used"
    told = "; ".join(f"({place}) {problem}" for place, problem in enumerate(problems.values(), 1))
    return f"{len(problems)} columns cannot be used: {told}; --drop-unusable leaves all of them out"


def nearest(name: str, names: Sequence[str], alike: float = 0.6) -> str | None:
    """The name that was probably meant, whatever its capitals: of those that are so much `alike` (from 0 to 1)."""
    lower = {other.lower(): other for other in names}
    return next((lower[other] for other in get_close_matches(name.lower(), lower, 1, alike)), None)


def readable(value: float, scale: float) -> str:
    """A number without the digits that float32 made up: rounded to 1e-5 of its scale."""
    decimals = 5 - math.floor(math.log10(scale))
    return f"{round(value, decimals) + 0.0:.15g}"  # + 0.0: no negative zero
