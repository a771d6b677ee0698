"""The column to be predicted: which task it poses, and its values as a network learns them, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from dapcal.amounts import amount
from dapcal.tables.columns import LIMIT, find, nearest
from dapcal.tables.date_texts import are_dates
from dapcal.tables.fitting import mean_and_deviation
from dapcal.tables.values import Kind, is_number, is_text, numbers, short, texts

TaskName = Literal["classification", "regression"]
Original = Literal["text", "number", "boolean"]

MAX_CLASSES = 1000
_FEW = 20  # distinct whole numbers up to which they may be classes
_ROWS_PER_CLASS = 10  # and how many rows each should have on average
_NO_TARGET = "the target is missing; leave out such rows"
_EXACT = 2.0**53  # whole numbers up to here are told apart by float64


class Task(NamedTuple):
    """What a column poses, and why it was taken so."""

    name: TaskName
    reason: str


def guess(column: pa.ChunkedArray, name: str = "target") -> Task:
    """Texts and booleans are classes, and so are a few whole numbers that repeat; other numbers are amounts."""
    if not is_number(column.type):
        return Task("classification", f"{_original(column.type)}s: classification")
    values = numbers(column, name)
    values = values[~np.isnan(values)]
    distinct, rows = len(np.unique(values)), len(values)
    if (values != np.round(values)).any():
        return Task("regression", "numbers with fractions: regression; use --task classification if they are classes")
    found = f"{distinct:,} distinct whole numbers among {rows:,} rows"
    if distinct <= 2 or (distinct <= _FEW and rows >= _ROWS_PER_CLASS * distinct):
        return Task("classification", f"{found}: classification; use --task regression if they are amounts")
    return Task("regression", f"{found}: regression; use --task classification if they are classes")


@dataclass(frozen=True)
class Classes:
    """Classes by name, sorted: numbers by value, texts by their characters.

    Attributes:
        labels: K names.
        original: what the column held.
    """

    labels: tuple[str, ...]
    original: Original

    @property
    def expected(self) -> Kind:
        """Kind of the column, for `dapcal.tables.files.stream`."""
        return "number" if self.original == "number" else "category"

    def encode(self, column: pa.ChunkedArray, first_row: int = 1, name: str = "target") -> Tensor:
        """Positions of the labels, (N,) long; a missing or unknown label is refused."""
        text = labels_of(column, self.original, name, first_row)
        found = pc.fill_null(pc.index_in(text, pa.array(self.labels, pa.string())), -1).to_numpy()
        if len(found) and found.min() < 0:
            row = int(np.argmin(found))
            raise ValueError(f"Row {first_row + row}: {_unknown(text[row].as_py(), self.labels)}")
        return torch.from_numpy(found.astype(np.int64))

    def decode(self, y: Tensor) -> list[str]:
        """Names of classes (N,)."""
        return [self.labels[position] for position in y.tolist()]

    def as_json(self) -> dict[str, Any]:
        """A description that `target_from_json` reads back exactly."""
        return {"kind": "classes", "labels": list(self.labels), "original": self.original}


@dataclass(frozen=True)
class Numbers:
    """Amounts, standardised for the network: (value − center)/scale, or (log value − center)/scale.

    Attributes:
        center: mean of the training rows' amounts, or of their logarithms.
        scale: standard deviation likewise.
        smearing: None: the network learns amounts; else it learns logarithms, so that what it predicts is a median,
            and this times it the mean.
    """

    center: float
    scale: float
    smearing: float | None = None

    @property
    def expected(self) -> Kind:
        """Kind of the column, for `dapcal.tables.files.stream`."""
        return "number"

    @property
    def labels(self) -> tuple[str, ...]:
        """Amounts have no classes."""
        return ()

    def encode(self, column: pa.ChunkedArray, first_row: int = 1, name: str = "target") -> Tensor:
        """Standardised amounts, (N, 1) float32; a missing one is refused."""
        values = numbers(column, name, first_row=first_row)
        if self.smearing is not None:
            low = values <= 0
            if low.any():
                raise ValueError(
                    f"Row {first_row + int(np.argmax(low))}: the target is {amount(values[low][0])}, and those of the "
                    "training rows are all above 0; correct it"
                )
            values = np.log(values)
        with np.errstate(over="ignore"):  # what overflows is too far, and refused
            values = (values - self.center) / self.scale
        missing, far = np.isnan(values), np.abs(values) > LIMIT
        if missing.any():
            raise ValueError(f"Row {first_row + int(np.argmax(missing))}: {_NO_TARGET}")
        if far.any():
            raise ValueError(
                f"Row {first_row + int(np.argmax(far))}: the target lies more than a million standard deviations from "
                "the training rows; correct it"
            )
        return torch.from_numpy(values.astype(np.float32))[:, None]

    def decode(self, y: Tensor) -> Tensor:
        """Amounts in the table's unit, of the same shape, float64."""
        values = self.center + self.scale * y.double()
        return values if self.smearing is None else values.exp()

    def standardised(self, amount: float) -> float:
        """The network's target of an amount; −∞ of what no logarithm has."""
        if self.smearing is not None:
            amount = math.log(amount) if amount > 0 else -math.inf
        return (amount - self.center) / self.scale

    def as_json(self) -> dict[str, Any]:
        """A description that `target_from_json` reads back exactly."""
        told = {"kind": "numbers", "center": self.center.hex(), "scale": self.scale.hex()}
        return told if self.smearing is None else {**told, "smearing": self.smearing.hex()}


def fit_target(column: pa.ChunkedArray, task: TaskName | None = None, name: str = "target") -> Classes | Numbers:
    """Learn classes, or center and scale, from the training rows; missing values do not count.

    Args:
        column: the target of the training rows.
        task: by default what `guess` says.
        name: what errors call the column.
    """
    if task not in (None, "classification", "regression"):
        raise ValueError(f"Expected `task` as classification or regression, got {task!r}")
    if not _present(column, name).any():
        raise ValueError("The target has no values; choose another column")
    if pa.types.is_temporal(column.type) or (is_text(column.type) and are_dates(texts(column, name))):
        raise ValueError("The target holds dates or times; make numbers of it, e.g. days since a day that matters")
    regression = (task or guess(column, name).name) == "regression"
    return _fit_numbers(column, name) if regression else _fit_classes(column, name)


def with_target(table: pa.Table, target: str) -> tuple[pa.Table, str | None]:
    """The rows that have a target, and a note if there are others."""
    present = _present(table[find(table, target)], target)
    missing = int((~present).sum())
    if missing == len(table):
        raise ValueError(f"No row has a value of `{target}`; choose another target")
    if not missing:
        return table, None
    return table.filter(pa.array(present)), f"{missing:,} of {len(table):,} rows have no `{target}`: left out"


def without_single(rows: pa.Table, target: str, task: TaskName | None = None) -> tuple[pa.Table, str | None]:
    """The rows whose class has another row, and a note if others are left out; all rows where these are half of them.

    A class needs a row to learn from and one to check. Where it is most classes that have one row, the target is none.
    """
    column = rows[target]
    if (task or guess(column, target).name) != "classification" or pa.types.is_temporal(column.type):
        return rows, None
    labels = labels_of(column, _original(column.type), target)
    counts = pc.value_counts(labels)
    single = counts.field("values").filter(pc.equal(counts.field("counts"), 1))
    if not len(single) or len(single) > len(counts) - 2 or 2 * len(single) > len(rows):
        return rows, None
    one = len(single) == 1
    told = (
        f"{len(single):,} of {len(counts):,} classes of `{target}` {'has' if one else 'have'} a single row "
        f"({_named(sorted(single.to_pylist()))}), which cannot be learnt from and checked on as well: left out, and "
        "never predicted"
    )
    return rows.filter(pc.invert(pc.is_in(labels, single))), told


def usable(goal: Classes | Numbers, column: pa.ChunkedArray, name: str) -> np.ndarray:
    """Rows that have a value, (N,), and of classes one that is known, of logarithms one that has them."""
    present = _present(column, name)
    if isinstance(goal, Numbers):
        return present if goal.smearing is None else present & (numbers(column, name) > 0)
    return pc.is_in(labels_of(column, goal.original, name), pa.array(goal.labels, pa.string())).to_numpy() & present


def _present(column: pa.ChunkedArray, name: str) -> np.ndarray:
    """Rows that have a value."""
    if is_number(column.type):
        return ~np.isnan(numbers(column, name))
    return (column if pa.types.is_temporal(column.type) else texts(column, name)).is_valid().to_numpy()


def _fit_classes(column: pa.ChunkedArray, name: str) -> Classes:
    original = _original(column.type)
    counts = pc.value_counts(labels_of(column, original, name).drop_null()).to_pylist()
    labels = [count["values"] for count in counts]
    if len(labels) < 2 and original == "number":  # of prices nobody thinks as classes
        raise ValueError(f"The target is {labels[0]} in every row; there is nothing to predict")
    if len(labels) < 2:
        raise ValueError(f"The target has one class only ({short(labels[0])}); give rows of at least two")
    if len(labels) > MAX_CLASSES:
        raise ValueError(
            f"Expected at most {MAX_CLASSES:,} classes, got {len(labels):,}; "
            + ("use --task regression" if original == "number" else "choose another target, or merge rare classes")
        )
    single = sorted(count["values"] for count in counts if count["counts"] == 1)
    if single:
        raise ValueError(
            f"{len(single):,} of {len(labels):,} classes have a single row ({_named(single)}), and a class needs one "
            "to learn from and one to check; merge them, leave those rows out"
            + (", or use --task regression" if original == "number" else "")
        )
    return Classes(tuple(sorted(labels, key=float if original == "number" else None)), original)


def _fit_numbers(column: pa.ChunkedArray, name: str) -> Numbers:
    if not is_number(column.type):
        held = f"{_original(column.type)}s"
        raise ValueError(f"Expected numbers in the target for regression, got {held}; use --task classification")
    values = numbers(column, name)
    values = values[~np.isnan(values)]
    center, scale = mean_and_deviation(values, name)
    if not scale and values.min() < values.max():  # squares of numbers below 1e-162 are 0
        raise ValueError(
            f"The target's values differ by {amount(np.ptp(values), 3)} around {amount(values[0], 3)}, too little to "
            "see; rescale"
        )
    if not scale:
        raise ValueError(f"The target is {amount(values[0])} in every row; there is nothing to predict")
    return Numbers(center, scale)


def logarithmic(column: pa.ChunkedArray, smearing: float, name: str = "target") -> Numbers:
    """Logarithms of amounts, which are all above 0 and not all the same; `smearing` as in `Numbers`."""
    return Numbers(*mean_and_deviation(np.log(numbers(column, name)), name), smearing)


def _original(kind: pa.DataType) -> Original:
    if is_number(kind):
        return "number"
    return "boolean" if pa.types.is_boolean(kind) else "text"


def labels_of(column: pa.ChunkedArray, original: Original, name: str, first_row: int = 1) -> pa.ChunkedArray:
    """A column of classes as texts, null where missing."""
    if original != "number":
        return texts(column, name)
    values = numbers(column, name, first_row=first_row)
    if (np.abs(values) >= _EXACT).any():
        raise ValueError(f"The target holds numbers beyond {_EXACT:.0f} as classes; write them as texts")
    return texts(pa.chunked_array([pa.array(values, from_pandas=True)]), name)


def _named(labels: Sequence[str]) -> str:
    """The first few classes, and how many more there are."""
    return ", ".join(map(short, labels[:5])) + (f" and {len(labels) - 5:,} more" if len(labels) > 5 else "")


def _unknown(label: str | None, labels: tuple[str, ...]) -> str:
    if label is None:
        return _NO_TARGET
    near = nearest(label, labels)
    known = ", ".join(labels[:10]) + (", …" if len(labels) > 10 else "")
    return f"the target {label!r} is not a class of the training rows" + (
        f"; did you mean {near!r}?" if near else f"; these are: {known}"
    )
