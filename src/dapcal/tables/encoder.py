"""All columns of a table but the target, as one matrix (N, P) and back; `dapcal.tables.columns` says how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dapcal.tables.columns import Category, Number, all_of, find, listed
from dapcal.tables.dates import Date
from dapcal.tables.fitting import fit_column
from dapcal.tables.told import note_of
from dapcal.tables.values import Kind

Column = Number | Category | Date


def fit_encoder(
    table: pa.Table,
    target: str,
    drop: Sequence[str] = (),
    unusable: Mapping[str, str] | None = None,
    drop_unusable: bool = False,
    numbers: Sequence[str] = (),
    places: np.ndarray | None = None,
) -> Encoder:
    """Learn from the training rows how every column but the target is encoded.

    Refused, because a number must be made of it first: free text. Dropped with a note: columns without a value,
    texts that are different in every row, and numbers that number the rows (they name rows, and say nothing about new
    ones; `dapcal.tables.fitting.are_ids`).

    Args:
        table: training rows, as `dapcal.tables.files.read` gives them.
        target: the column to be predicted.
        drop: columns to leave out.
        unusable: columns that are known to be so, and why (`dapcal.tables.files.read`).
        drop_unusable: leave out what would be refused, with a note.
        numbers: columns to learn even if they look as if they numbered the rows.
        places: of the rows that say which levels there are and which cells may be missing; by default all. Held-out
            rows that give p-values have to be as new to the columns as rows to come, some of which have levels of their
            own.
    """
    check_columns(table, target, drop, unusable, numbers)
    columns: list[Column] = []
    notes: list[str] = []
    dropped = list(drop)
    problems = {name: problem for name, problem in (unusable or {}).items() if name not in drop}
    for name in table.column_names:
        if name == target or name in drop or name in problems:
            continue
        try:
            column, note = fit_column(table[name], name, name in numbers, places)
        except ValueError as error:
            problems[name] = str(error)
            continue
        notes += [note] if note else []
        if column is None:
            dropped.append(name)
        else:
            columns.append(column)
            notes += note_of(table, name)
    if problems and not drop_unusable:
        raise ValueError(all_of(problems))
    dropped += problems
    notes += [f"left out: {problem}" for problem in problems.values()]
    if not columns:
        raise ValueError(f"No column is left to predict `{target}` from; " + ("; ".join(notes) or "add one"))
    return Encoder(tuple(columns), target, tuple(dropped), tuple(notes))


def check_columns(
    table: pa.Table, target: str, drop: Sequence[str], unusable: Mapping[str, str] | None, numbers: Sequence[str]
) -> None:
    """That the columns that are named are there, the target can be one, and there are rows."""
    for name in (target, *drop, *numbers):
        find(table, name)
    if target in drop:
        raise ValueError(f"Column `{target}` is the target and cannot be dropped")
    if not len(table):
        raise ValueError("Expected at least one training row, got none")
    if unusable and target in unusable:
        raise ValueError(unusable[target])


class Encoded(NamedTuple):
    """Rows as a network takes them, and what had to be made up for."""

    x: Tensor  # (N, P) float32, finite
    unknown: dict[str, Counter[str]]  # column: levels that training never saw, and their rows
    imputed: dict[str, int]  # column: rows without a value, where training had none such
    ignored: tuple[str, ...]  # columns that the model does not know


@dataclass(frozen=True)
class Encoder:
    """Fitted columns; call it on a table.

    Attributes:
        columns: in the order of the training table.
        target: the column that is predicted; tables may hold it or not.
        dropped: columns of the training table that are left out.
        notes: what was decided on the way, in words.
    """

    columns: tuple[Column, ...]
    target: str
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __call__(self, table: pa.Table, first_row: int = 1) -> Encoded:
        """Encode rows; `first_row` is what errors call the first one."""
        self._check_columns(table)
        x = np.zeros((len(table), self.width), np.float32)  # (N, P)
        counts = {
            column.name: column.encode(table[find(table, column.name)], part, first_row)
            for column, part in self._parts(x)
        }
        known = {self.target, *self.dropped, *counts}
        return Encoded(
            x=torch.from_numpy(x),
            unknown={name: count.unknown for name, count in counts.items() if count.unknown},
            imputed={name: count.imputed for name, count in counts.items() if count.imputed},
            ignored=tuple(name for name in table.column_names if name not in known),
        )

    @cached_property
    def width(self) -> int:
        """P."""
        return sum(column.width for column in self.columns)

    @property
    def names(self) -> tuple[str, ...]:
        """For each of the P inputs the table's column that it comes from."""
        return tuple(column.name for column in self.columns for _ in range(column.width))

    @property
    def expected(self) -> dict[str, Kind]:
        """Kinds of the columns, for `dapcal.tables.files.stream`."""
        kinds: dict[type, Kind] = {Number: "number", Category: "category", Date: "date"}
        return {column.name: kinds[type(column)] for column in self.columns}

    def missing(self, x: Tensor) -> list[list[str]]:
        """The columns without a value, of every encoded row (N, P)."""
        self._check_width(x)
        found: list[list[str]] = [[] for _ in range(len(x))]
        names, places = self._marks
        rows, marks = np.nonzero(x.detach().cpu().numpy()[:, places] > 0.5)
        for row, mark in zip(rows.tolist(), marks.tolist(), strict=True):
            found[row].append(names[mark])
        return found

    def decode(self, x: Tensor) -> list[dict[str, str]]:
        """Readable values of encoded rows (N, P)."""
        self._check_width(x)
        matrix = x.detach().cpu().double().numpy()
        shown = {column.name: column.decode(part) for column, part in self._parts(matrix)}
        return [dict(zip(shown, row, strict=True)) for row in zip(*shown.values(), strict=True)]

    def as_json(self) -> dict[str, Any]:
        """A description that `encoder_from_json` reads back exactly."""
        return {
            "target": self.target,
            "dropped": list(self.dropped),
            "notes": list(self.notes),
            "columns": [column.as_json() for column in self.columns],
        }

    @cached_property
    def _marks(self) -> tuple[list[str], list[int]]:
        """Columns with a 0/1 column for missing values, and its place."""
        names, places, start = [], [], 0
        for column in self.columns:
            if column.marked:
                names.append(column.name)
                places.append(start + ((column.mark or 0) if isinstance(column, Category) else 1))
            start += column.width
        return names, places

    def _check_width(self, x: Tensor) -> None:
        if x.ndim != 2 or x.shape[1] != self.width:
            raise ValueError(f"Expected encoded rows of shape (N, {self.width}), got {tuple(x.shape)}")

    def _check_columns(self, table: pa.Table) -> None:
        """A table that lacks several columns is another table: one message names them."""
        present = set(table.column_names)  # which are made anew by every asking
        absent = [column.name for column in self.columns if column.name not in present]
        if len(absent) < 2:
            return  # one may be misspelt, and `find` says so
        raise ValueError(
            f"{len(absent)} of the {len(self.columns)} columns that the model was fitted on are missing: "
            f"{listed(absent)}; the table has: {listed(table.column_names)}"
        )

    def _parts(self, matrix: np.ndarray) -> Iterator[tuple[Column, np.ndarray]]:
        """Every column with its share of a matrix (N, P)."""
        start = 0
        for column in self.columns:
            yield column, matrix[:, start : start + column.width]
            start += column.width
