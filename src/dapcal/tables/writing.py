"""Tables written batch by batch to a CSV, TSV or Parquet file, which is complete or not there."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from dapcal.files import complete_or_absent


class Writer:
    """Appends tables to a file and counts their rows."""

    def __init__(self, append: Callable[[pa.Table], None]) -> None:
        self.append = append
        self.rows = 0

    def __call__(self, table: pa.Table) -> None:
        """Append a table."""
        self.append(table)
        self.rows += len(table)


@contextmanager
def writer(path: Path) -> Iterator[Writer]:
    """A function that appends a table to the file, which appears when all is well."""
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".tsv", ".parquet", ".pq"):
        raise ValueError(f"Expected --out as a .csv, .tsv or .parquet file, got {path}")
    with complete_or_absent(path) as part, ExitStack() as stack:
        opened: list[Any] = []

        def append(table: pa.Table) -> None:
            if not opened:
                make = _parquet_writer if suffix in (".parquet", ".pq") else _text_writer
                opened.append(stack.enter_context(make(part, table.schema, "\t" if suffix == ".tsv" else ",")))
            opened[0].write_table(table)

        yield Writer(append)


def _parquet_writer(part: Path, schema: pa.Schema, _: str) -> Any:
    return pyarrow.parquet.ParquetWriter(part, schema)


@contextmanager
def _text_writer(part: Path, schema: pa.Schema, delimiter: str) -> Iterator[Any]:
    with part.open("wb") as file:
        header = io.StringIO()
        csv.writer(header, delimiter=delimiter, lineterminator="\n").writerow(schema.names)  # pyarrow quotes all names
        file.write(header.getvalue().encode())
        options = pyarrow.csv.WriteOptions(include_header=False, delimiter=delimiter)
        with pyarrow.csv.CSVWriter(file, schema, write_options=options) as writer:
            yield writer
