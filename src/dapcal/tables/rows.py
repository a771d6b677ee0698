"""A few rows as a network takes them, without a table: what a service is sent.

Numbers are standardised together, and a category that training knew is looked up. The rest is as the encoder has it,
which is asked for anything else: answers and errors are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dapcal.tables.columns import LIMIT, Category, Number
from dapcal.tables.encoder import Column, Encoder

Row = Mapping[str, Any]


class RowEncoder:
    """Encodes rows {column: value, None where unknown}; call it on some.

    Args:
        encoder: the columns.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        starts = np.cumsum([0, *(column.width for column in encoder.columns)]).tolist()
        placed = list(zip(encoder.columns, starts[:-1], strict=True))
        numbers = [(column, start) for column, start in placed if isinstance(column, Number)]
        self._names = [column.name for column, _ in numbers]
        self._center = np.array([column.center for column, _ in numbers])
        self._scale = np.array([column.scale for column, _ in numbers])
        self._places = [start for _, start in numbers]
        self._is_marked = np.array([column.marked for column, _ in numbers], bool)
        self._marks = [start + 1 for column, start in numbers if column.marked]
        self._magnitudes = [
            (place, start + column.width - 1, column.magnitude)
            for place, (column, start) in enumerate(numbers)
            if column.magnitude is not None
        ]
        self._others = [_Other.of(column, start) for column, start in placed if not isinstance(column, Number)]

    def __call__(self, rows: Sequence[Row]) -> Tensor:
        """(N, P)."""
        x = np.zeros((len(rows), self.encoder.width), np.float32)
        if not self._numbers(rows, x):
            return self._by_table(rows)
        for other in self._others:
            other(rows, x)
        return torch.from_numpy(x)

    def _numbers(self, rows: Sequence[Row], x: np.ndarray) -> bool:
        """Fill in the numbers, all columns at once; False where one is none, or is refused."""
        values = [[row[name] for name in self._names] for row in rows]
        if not {type(value) for row in values for value in row} <= {float, type(None)}:
            return False
        with np.errstate(over="ignore"):  # what overflows is too far, and refused
            amounts = np.array(values, np.float64).reshape(len(rows), -1)
            standardised = (amounts - self._center) / self._scale
        if (np.abs(standardised) > LIMIT).any():
            return False
        missing = np.isnan(standardised)
        x[:, self._places] = np.where(missing, 0.0, standardised)
        x[:, self._marks] = missing[:, self._is_marked]
        for place, start, magnitude in self._magnitudes:
            x[:, start] = np.where(missing[:, place], 0.0, magnitude(amounts[:, place]))
        return True

    def _by_table(self, rows: Sequence[Row]) -> Tensor:
        types = {c.name: pa.float64() if isinstance(c, Number) else pa.string() for c in self.encoder.columns}
        return self.encoder(pa.table({name: _array(rows, name, kind) for name, kind in types.items()})).x


class _Other(NamedTuple):
    """A column that is not a number."""

    column: Column
    start: int
    known: dict[str | None, int]  # values that are looked up
    lines: np.ndarray  # what they are encoded as, (known, width)

    @classmethod
    def of(cls, column: Column, start: int) -> _Other:
        known: list[str | None] = [*column.levels, *column.rare, None] if isinstance(column, Category) else []
        lines = np.zeros((len(known), column.width), np.float32)
        if known:
            column.encode(pa.chunked_array([pa.array(known, pa.string())]), lines, 1)
        return cls(column, start, {value: place for place, value in enumerate(known)}, lines)

    def __call__(self, rows: Sequence[Row], x: np.ndarray) -> None:
        part = x[:, self.start : self.start + self.column.width]
        places = [self.known.get(row[self.column.name], -1) for row in rows]
        if -1 in places:
            self.column.encode(pa.chunked_array([_array(rows, self.column.name, pa.string())]), part, 1)
        else:
            part[:] = self.lines[places]


def _array(rows: Sequence[Row], name: str, kind: pa.DataType) -> pa.Array:
    return pa.array([row[name] for row in rows], kind)
