"""CSV and TSV files: separator and names from the header, every value as text, and rows that do not fit refused."""

from __future__ import annotations

import csv
import gzip
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from dapcal.records import DapcalWarning
from dapcal.tables.sources import Source, pieces
from dapcal.tables.values import are_numbers, at, short

_BLOCK_BYTES = 1 << 20  # parsed at a time; no row may be longer
_MOST_LINE = 1 << 22  # characters of a line, before anything is known of the columns


def open_delimited(path: Path, rows: int) -> Source:
    """CSV and TSV, every value as text."""
    separator, names, skipped = _header(path)
    ragged: list[Any] = []

    def remember(row: Any) -> str:
        ragged.append(row)
        return "error"

    def batches() -> Iterator[pa.Table]:
        first_row = 1
        breaks = _LineBreaks(path, separator)
        try:
            reader = pa.csv.open_csv(
                path,
                pa.csv.ReadOptions(
                    use_threads=False, block_size=_BLOCK_BYTES, column_names=names, skip_rows_after_names=skipped
                ),
                pa.csv.ParseOptions(
                    delimiter=separator,
                    newlines_in_values=True,
                    ignore_empty_lines=len(names) > 1,  # in a table of one column they are missing values
                    invalid_row_handler=remember,
                ),
                pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False),
            )
            for batch in reader:
                _check_nul(batch, path, first_row)
                breaks.look(batch, first_row)
                first_row += len(batch)
                yield from pieces(pa.Table.from_batches([batch]), rows)
            if first_row == 1:
                raise ValueError(f"{path} has a header and no rows; expected at least one")
            breaks.tell()
        except pa.ArrowInvalid as error:
            if ragged:
                _check_quotations(path, separator)  # which may be why
                row = ragged[0]
                if len(names) == 1:
                    raise ValueError(
                        f"{path} has one name in its header ({short(names[0])}) and {row.actual_columns} values in row "
                        f"{row.number - skipped}; remove lines above the header, such as a title"
                    ) from error
                raise ValueError(
                    f"{at(str(path), row.number - skipped)}: {row.actual_columns} values where the header names "
                    f"{row.expected_columns} columns ({short(row.text)}); correct the row, or put quotation marks "
                    "around values that hold a separator"
                ) from error
            if "straddl" in str(error):
                raise ValueError(
                    f"{path} has a row of more than {_BLOCK_BYTES >> 20} MiB; is there a quotation mark that is never "
                    "closed? A table as wide as that can be read as a Parquet file"
                ) from error
            raise

    return Source(names, batches, untyped=True)


def _header(path: Path) -> tuple[str, tuple[str, ...], int]:
    """Separator, names, and how many lines they take; the separator is the first that gives more than one column."""
    separators = "\t,;|" if ".tsv" in path.name.lower() else ",;\t|"
    for separator in (*separators, separators[0]):  # the usual one for a single column
        names, skipped = _first_line(path, separator)
        if len(names) > 1:
            break
    if names[0].lower() == "sep=":
        raise ValueError(f"{path} begins with the line sep=, which Excel alone understands; remove that line")
    if all(are_numbers(pa.chunked_array([pa.array(names)]))):
        raise ValueError(f"{path} has no header, its first line holds numbers alone; add a line that names the columns")
    return separator, names, skipped


def _first_line(path: Path, separator: str) -> tuple[tuple[str, ...], int]:
    with _text_of(path) as file:
        text = _lines(file, path)
        try:
            for lines, row in enumerate(csv.reader(text, delimiter=separator), 1):
                if row and not any(line.strip() for line in text):
                    raise ValueError(f"{path} has a header and no rows; expected at least one")
                if row:
                    return tuple(name.strip() for name in row), lines
        except csv.Error as error:
            raise ValueError(
                f"{path} has a header that cannot be read ({error}); is there a quotation mark that is never closed?"
            ) from error
    raise ValueError(f"{path} is empty; expected a table with a header")


def _text_of(path: Path) -> IO[str]:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _lines(file: IO[str], path: Path) -> Iterator[str]:
    """The lines of a file, none of them longer than memory should hold."""
    for number in itertools.count(1):
        line = file.readline(_MOST_LINE)
        if len(line) == _MOST_LINE:
            raise ValueError(f"{path} has more than {_MOST_LINE >> 20} MiB in line {number}; is it a table of lines?")
        if not line:
            return
        yield line


def _check_nul(batch: pa.RecordBatch, path: Path, first_row: int) -> None:
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        found = _holding(column, "\0")
        if found.any():
            where = at(str(path), first_row + int(np.argmax(found)))
            raise ValueError(f"{where}: column `{name}` holds a NUL byte; save the table as text in UTF-8")


class _LineBreaks:
    """Values over several lines: rows that a quotation mark in a wrong place has swallowed, or a text as it should be.

    A file without any has lost no row. At the first one the whole file is read once more, strictly: every quotation
    has to end, and to end where its value does.
    """

    def __init__(self, path: Path, separator: str) -> None:
        self.path, self.separator = path, separator
        self.rows = 0
        self.first: tuple[int, str] | None = None

    def look(self, batch: pa.RecordBatch, first_row: int) -> None:
        rows = np.zeros(len(batch), dtype=bool)
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            found = _holding(column, "\n") | _holding(column, "\r")
            if self.first is None and found.any():
                self.first = (first_row + int(np.argmax(found)), name)
                _check_quotations(self.path, self.separator)
            rows |= found
        self.rows += int(rows.sum())

    def tell(self) -> None:
        """A quotation mark too many can also be closed by the next one: whoever knows the table sees it here."""
        if self.first is None:
            return
        row, name = self.first
        more = "" if self.rows == 1 else f", the first of {self.rows:,} such rows"
        warnings.warn(
            f"{at(str(self.path), row)}: column `{name}` holds a line break within quotation marks{more}; if rows are "
            "missing, a quotation mark there is in the wrong place",
            DapcalWarning,
            stacklevel=2,
        )


def _check_quotations(path: Path, separator: str) -> None:
    row = -1  # the header is none
    try:
        with _text_of(path) as file:
            for values in csv.reader(_lines(file, path), delimiter=separator, strict=True):
                row += bool(values)
    except csv.Error as error:
        where = at(str(path), row + 1)
        if "field limit" in str(error):
            raise ValueError(
                f"{where}: a value of more than {csv.field_size_limit() >> 10} KiB in quotation marks; is there one "
                "that is never closed?"
            ) from error
        raise ValueError(
            f"{where}: a quotation never ends, or ends in the middle of a value, so that rows would be lost; close its "
            "quotation mark"
        ) from error


def _holding(column: pa.Array, character: str) -> np.ndarray:
    """Which values of a column of texts hold an ASCII character."""
    data = column.buffers()[2]
    # a look at the raw bytes is quick; the buffer may end in padding, so only its texts decide
    if data is None or not (np.frombuffer(data, np.uint8) == ord(character)).any():
        return np.zeros(len(column), dtype=bool)
    return pc.match_substring(column, character).to_numpy(zero_copy_only=False)
