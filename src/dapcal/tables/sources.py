"""A file that is open: names of its columns and batches of its rows, and whatever is wrong with it in one line."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

MOST_COLUMNS = 20_000  # of a table: each is an object in every batch, and an input of the network


class Source(NamedTuple):
    """An opened file with at least one row."""

    names: tuple[str, ...]
    batches: Callable[[], Iterator[pa.Table]]
    untyped: bool  # a format in which everything is text


def batches_of(source: Source, path: Path) -> Iterator[pa.Table]:
    """The batches of a source; only what its reader raises is told in one line, not what is done with them."""
    batches = source.batches()
    while True:
        with in_one_line(path):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def check_width(columns: int, path: Path) -> None:
    """Refuse a table of more columns than a network for tables is for."""
    if columns > MOST_COLUMNS:
        raise ValueError(
            f"{path} has {columns:,} columns, and a table may have {MOST_COLUMNS:,}; write it with those that matter, "
            "or train a network of your own and use `dapcal calibrate`"
        )


def pieces(table: pa.Table, rows: int) -> Iterator[pa.Table]:
    """A table in parts of at most `rows` rows."""
    for start in range(0, len(table), rows):
        yield table.slice(start, rows)


def regular(tables: Iterable[pa.Table], rows: int) -> Iterator[pa.Table]:
    """The same rows in tables of `rows` rows, but for the last, however a file was written."""
    held: list[pa.Table] = []
    count = 0
    for table in tables:
        for piece in pieces(table, rows):
            held.append(piece)
            count += len(piece)
            if count >= rows:
                whole = pa.concat_tables(held) if len(held) > 1 else held[0]
                yield whole.slice(0, rows)
                held, count = ([whole.slice(rows)], count - rows) if count > rows else ([], 0)
    if count:
        yield pa.concat_tables(held)


@contextmanager
def in_one_line(path: Path) -> Iterator[None]:
    """What pyarrow, NumPy, gzip and zip raise, as one line that names the file and a remedy."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        told = " ".join(str(error).split())
        if isinstance(error, UnicodeDecodeError) or "UTF8" in told:
            raise ValueError(
                f"{path} is not UTF-8; save it as UTF-8 (in Excel: CSV UTF-8; or iconv -f latin1 -t utf-8)"
            ) from error
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"{path} is damaged or incomplete ({told[:200]}); write or copy it again") from error


def head_of(path: Path) -> bytes:
    """The first bytes of a file that can be read."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise OSError("no regular file")  # a pipe cannot be read twice
        with path.open("rb") as file:
            return file.read(1 << 16)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is no file {path}; check the path") from error
    except IsADirectoryError as error:
        raise IsADirectoryError(f"{path} is a directory; name a file in it") from error
    except PermissionError as error:
        raise PermissionError(f"{path} may not be read; check its permissions") from error
    except (OSError, RuntimeError) as error:
        raise OSError(f"Could not open {path}: {getattr(error, 'strerror', None) or error}; check the path") from error
