"""Excel files: the first sheet, every cell as the text that a CSV file would hold, so that the same rules read it."""

from __future__ import annotations

import datetime
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from dapcal.records import DapcalWarning
from dapcal.tables.sources import Source, pieces

_LARGEST = 2**30  # bytes of its parts, unpacked: a small archive may claim to hold anything


def open_excel(path: Path, rows: int) -> Source:
    """A workbook whose first sheet begins with a line of names; lines without any value are left out."""
    try:
        from openpyxl import load_workbook
        from openpyxl.utils.exceptions import InvalidFileException
    except ImportError as error:
        raise ImportError(
            f"{path} needs openpyxl; install it with: pip install 'dapcal[excel]', or export a CSV file"
        ) from error
    with zipfile.ZipFile(path) as archive:
        size = sum(part.file_size for part in archive.infolist())
    if size > _LARGEST:
        raise ValueError(f"{path} unpacks to {size / 2**30:.1f} GiB; export the sheet as CSV")
    try:
        book = load_workbook(path, read_only=True, data_only=True)
    except (InvalidFileException, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} is not an Excel workbook that can be read ({error}); export the sheet as CSV"
        ) from error
    try:
        sheet = book.worksheets[0]
        if len(book.worksheets) > 1:
            told = f"{path} has {len(book.worksheets)} sheets; the first, {sheet.title!r}, is read"
            warnings.warn(told, DapcalWarning, stacklevel=2)
        lines = [line for line in sheet.iter_rows(values_only=True) if any(cell is not None for cell in line)]
    finally:
        book.close()
    if len(lines) < 2:
        raise ValueError(
            f"{path} has {'a header and no rows' if lines else 'no values'} in its first sheet; expected a table"
        )
    width = max(place + 1 for place, cell in enumerate(lines[0]) if cell is not None)
    names = tuple(_text(cell).strip() for cell in lines[0][:width])
    beyond = next((place for place, line in enumerate(lines) if any(cell is not None for cell in line[width:])), None)
    if beyond is not None:
        raise ValueError(
            f"{path}, row {beyond}: values beyond the {width} columns that the header names; name them too"
        )
    columns = [[_text(line[place]) if place < len(line) else "" for line in lines[1:]] for place in range(width)]
    table = pa.Table.from_arrays([pa.array(column, pa.string()) for column in columns], list(names))

    def batches() -> Iterator[pa.Table]:
        return pieces(table, rows)

    return Source(names, batches, untyped=True)


def _text(cell: Any) -> str:
    """As a CSV file would hold it."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, float):
        return repr(int(cell)) if cell.is_integer() and abs(cell) < 2**53 else repr(cell)
    if isinstance(cell, datetime.datetime):
        at_midnight = cell.time() == datetime.time()
        return cell.date().isoformat() if at_midnight else cell.isoformat(" ", "seconds")
    return str(cell)
