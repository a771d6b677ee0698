"""Parquet and npz files, whose columns come with types."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from dapcal import npz
from dapcal.tables.sources import Source, check_width, pieces, regular
from dapcal.tables.values import is_number, is_text

_MOST_VALUE = 1 << 20  # bytes of a value, as in a row of a CSV file
_MOST_CHUNK = 1 << 30  # bytes of a column in a row group


def open_parquet(path: Path, rows: int) -> Source:
    """Numbers, texts, booleans, dates and times; nested columns are refused."""
    file = pa.parquet.ParquetFile(path, buffer_size=1 << 16)  # otherwise a row group is held as a whole
    for field in file.schema_arrow:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        simple = pa.types.is_boolean(kind) or pa.types.is_null(kind) or pa.types.is_temporal(kind)
        if not (simple or is_text(kind) or is_number(kind)):
            raise ValueError(
                f"{path}: column `{field.name}` holds {field.type}, which is neither number nor text; flatten it, or "
                "write the file without it"
            )
    _check_sizes(file.metadata, path)
    if not file.metadata.num_rows:
        raise ValueError(f"{path} has columns and no rows; expected at least one")

    def batches() -> Iterator[pa.Table]:
        found = 0
        for batch in regular((pa.Table.from_batches([b]) for b in file.iter_batches(batch_size=rows)), rows):
            found += len(batch)
            yield batch
        if found != file.metadata.num_rows:
            raise ValueError(
                f"{path} is damaged or incomplete ({found} rows where it announces {file.metadata.num_rows}); write or "
                "copy it again"
            )

    return Source(tuple(file.schema_arrow.names), batches, untyped=False)


def parquet_rows(path: Path, start: int, stop: int, rows: int) -> Iterator[pa.Table]:
    """Rows `start` to `stop` (which may lie anywhere in the file), in batches as `open_parquet` has them."""
    file = pa.parquet.ParquetFile(path, buffer_size=1 << 16)
    ends = np.cumsum([file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)])
    first, last = int(np.searchsorted(ends, start, "right")), int(np.searchsorted(ends, stop, "left"))
    skipped = int(ends[first - 1]) if first else 0
    groups = list(range(first, last + 1))
    batches = (pa.Table.from_batches([batch]) for batch in file.iter_batches(batch_size=rows, row_groups=groups))
    yield from regular(_cut(batches, start - skipped, stop - skipped), rows)


def _cut(tables: Iterable[pa.Table], start: int, stop: int) -> Iterator[pa.Table]:
    """Rows `start` to `stop` of tables one after the other."""
    place = 0
    for table in tables:
        part = table.slice(max(start - place, 0), max(stop - max(start, place), 0))
        if len(part):
            yield part
        place += len(table)
        if place >= stop:
            return


def _check_sizes(metadata: Any, path: Path) -> None:
    """Refuse values that would have to be held in memory as a whole, by what the file says of them."""
    check_width(metadata.num_columns, path)
    for group in range(metadata.num_row_groups):
        chunks = metadata.row_group(group)
        for place in range(chunks.num_columns):
            chunk = chunks.column(place)
            if chunk.total_uncompressed_size > min(_MOST_CHUNK, _MOST_VALUE * max(chunk.num_values, 16)):
                raise ValueError(
                    f"{path}: column `{chunk.path_in_schema}` takes {chunk.total_uncompressed_size >> 20:,} MiB for "
                    f"{chunk.num_values:,} values; write the file without it, or with smaller row groups"
                )


def open_npz(path: Path, rows: int) -> Source:
    """A 1-D array is a column, and a 2-D array `x` is the columns x0, x1, … ."""
    columns: list[tuple[str, pa.Array]] = []
    lengths: dict[str, int] = {}
    arrays = {key: _array(path, key) for key in npz.names_of(path)}
    check_width(sum(math.prod(array.shape[1:]) for array in arrays.values()), path)
    for key, unread in arrays.items():
        array = unread.read()
        lengths[key] = len(array)
        if array.ndim == 1:
            columns.append((key, _as_arrow(array, key, path)))
        else:
            columns += [(f"{key}{i}", _as_arrow(values, key, path)) for i, values in enumerate(array.T)]
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"`{key}` has {rows}" for key, rows in lengths.items())
        raise ValueError(f"{path}: Expected arrays of one length, got others: {found}; save each table in its own file")
    if not any(lengths.values()):
        raise ValueError(f"{path} has no rows; write it with numpy.savez(path, x=x, y=y)")
    names = [name for name, _ in columns]
    table = pa.Table.from_arrays([values for _, values in columns], names)
    return Source(tuple(names), lambda: pieces(table, rows), untyped=False)


def _array(path: Path, key: str) -> npz.Array:
    found = npz.array(path, key)
    if len(found.shape) not in (1, 2) or 0 in found.shape[1:]:
        raise ValueError(
            f"{path}: Expected columns (1-D) or matrices (2-D), got array `{key}` of shape {found.shape}; save it as "
            "(rows, columns)"
        )
    return found


def _as_arrow(values: np.ndarray, name: str, path: Path) -> pa.Array:
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8")
    if values.dtype.kind == "f" and values.dtype.itemsize > 8:
        values = values.astype(np.float64)
    if values.dtype.kind not in "biufUMm":
        raise ValueError(
            f"{path}: array `{name}` holds {values.dtype}, which is neither number nor text; convert it before saving"
        )
    return pa.array(np.ascontiguousarray(values.astype(values.dtype.newbyteorder("="), copy=False)))
