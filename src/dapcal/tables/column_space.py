"""The space that a table's columns are checked in one by one: where the inputs of every column stand."""

from __future__ import annotations

from dapcal.distances import Space
from dapcal.distances.column_checks import Columns
from dapcal.distances.column_statistics import Part
from dapcal.distances.projectors import Identity
from dapcal.evidence import COLUMNS
from dapcal.tables.columns import Category, Number
from dapcal.tables.encoder import Column, Encoder


def column_space(encoder: Encoder) -> Space:
    """Where the columns of encoded rows are checked."""
    return Space(Identity(), Columns(parts_of(encoder), _copies(encoder)), radius=None, name=COLUMNS)


def parts_of(encoder: Encoder) -> tuple[Part, ...]:
    """Where the inputs of every column stand."""
    parts, start = [], 0
    for column in encoder.columns:
        parts.append(_part(column, start))
        start += column.width
    return tuple(parts)


def _copies(encoder: Encoder) -> tuple[int, ...]:
    """Magnitudes, which say of a number what it says itself."""
    found, end = [], 0
    for column in encoder.columns:
        end += column.width
        if isinstance(column, Number) and column.magnitude is not None:
            found.append(end - 1)
    return tuple(found)


def _part(column: Column, start: int) -> Part:
    if not isinstance(column, Category):
        mark = start + 1 if column.marked else None
        return Part(number=start, missing=mark, center=column.center, scale=column.scale)
    mark = None if column.mark is None else start + column.mark
    return Part(codes=tuple(range(start, start + column.indicators)), missing=mark)
