"""Files of CSV, TSV, Parquet, Excel and npz as pyarrow tables, whole or in batches; what is wrong is said in one line.

The suffix names the format, and `dapcal.tables.values` says how values are read. Rows count from 1, without header.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import pyarrow as pa

from dapcal.tables.columns import all_of, listed, nearest
from dapcal.tables.delimited import open_delimited
from dapcal.tables.excel import open_excel
from dapcal.tables.sampling import Sample, drawn
from dapcal.tables.sources import Source, batches_of, check_width, head_of, in_one_line
from dapcal.tables.told import with_notes
from dapcal.tables.typed import open_npz, open_parquet
from dapcal.tables.values import Kind, converted, guessed

BATCH_ROWS = 8192


def read(
    path: str | Path,
    expected: Mapping[str, Kind] | None = None,
    drop: Collection[str] = (),
    unusable: dict[str, str] | None = None,
) -> pa.Table:
    """The whole table, for fitting.

    A column of a CSV file is a number if all of its values are; Parquet and npz columns keep their types.

    Args:
        path: .csv or .tsv (also .csv.gz, .tsv.gz), .parquet or .pq, .xlsx, or .npz.
        expected: kinds of columns that are not to be guessed, e.g. {"postcode": "category"}.
        drop: columns that nobody will look at: whatever they hold, it stays as it is.
        unusable: takes up columns that cannot be used, and why, in place of an error; they stay texts.
    """
    source = _open(Path(path), BATCH_ROWS)
    table = pa.concat_tables(batches_of(source, Path(path)))
    return _typed(table, source, Path(path), expected or {}, drop, unusable)


def sample(
    path: str | Path,
    expected: Mapping[str, Kind] | None = None,
    drop: Collection[str] = (),
    unusable: dict[str, str] | None = None,
    seed: int = 0,
) -> Sample:
    """The whole table as `read` gives it, or, if it is too large to hold, a random sample of its rows.

    What a column of a CSV file holds is then what it holds in the sample.

    Args:
        path: as in `read`, and so the next three.
        expected: kinds of columns that are not to be guessed.
        drop: columns that nobody will look at.
        unusable: takes up columns that cannot be used.
        seed: of the sample.
    """
    source = _open(Path(path), BATCH_ROWS)
    found = drawn(batches_of(source, Path(path)), seed)
    return found._replace(table=_typed(found.table, source, Path(path), expected or {}, drop, unusable))


def _typed(
    table: pa.Table,
    source: Source,
    path: Path,
    expected: Mapping[str, Kind],
    drop: Collection[str],
    unusable: dict[str, str] | None,
) -> pa.Table:
    """Rows with the types that their values say, or that are expected."""
    for name in expected:
        if name not in source.names:
            near = nearest(name, source.names)
            told = f"did you mean `{near}`?" if near else f"the columns are: {listed(source.names)}"
            raise ValueError(f"{path} has no column `{name}`; {told}")
    table = as_expected(table, expected, str(path), 1)
    if not source.untyped:
        return table
    columns, notes, problems = dict(zip(source.names, table.columns, strict=True)), {}, {}
    for name, column in zip(source.names, table.columns, strict=True):
        if name not in expected and name not in drop:
            try:
                columns[name], notes[name] = guessed(column, name, str(path))
            except ValueError as error:
                problems[name] = str(error)
    if unusable is not None:
        unusable |= problems
    elif problems:
        raise ValueError(all_of(problems))
    return with_notes(pa.table(columns), notes)


def stream(path: str | Path, expected: Mapping[str, Kind] | None = None, rows: int = BATCH_ROWS) -> Iterator[pa.Table]:
    """The table in batches of at most `rows` rows, in bounded memory (an npz file is held as a whole).

    Args:
        path: as in `read`.
        expected: columns to convert, as the model knows them, so that what the first rows look like never decides; the
            others stay as they are (texts, in a CSV file).
        rows: of a batch, at most.
    """
    if rows < 1:
        raise ValueError(f"Expected `rows` of at least 1, got {rows}")
    found = batches_of(_open(Path(path), rows), Path(path))

    def batches() -> Iterator[pa.Table]:
        first_row = 1
        for batch in found:
            yield as_expected(batch, expected or {}, str(path), first_row)
            first_row += len(batch)

    return batches()


def unconverted(path: Path) -> Iterator[pa.Table]:
    """The batches of `stream` as the file has them; `as_expected` makes of each what `stream` gives."""
    return batches_of(_open(path, BATCH_ROWS), path)


def columns_of(path: str | Path) -> tuple[str, ...]:
    """Names of the columns, from the head of the file."""
    return _open(Path(path), BATCH_ROWS).names


def _open(path: Path, rows: int) -> Source:
    head = head_of(path)
    reader = _reader(path)
    _check_head(path, head, reader)
    with in_one_line(path):
        source = reader(path, rows)
    check_width(len(source.names), path)
    seen: set[str] = set()
    for position, name in enumerate(source.names, 1):
        if not name:
            raise ValueError(
                f"{path}: column {position} has no name; name it in the header, or write the file without it "
                "(pandas: index=False)"
            )
        if name in seen:
            raise ValueError(f"{path} has two columns named `{name}`; rename one of them")
        seen.add(name)
    return source


def _reader(path: Path) -> Callable[[Path, int], Source]:
    """How files of this suffix are read."""
    suffix = "".join(path.suffixes[-2:] if path.suffix.lower() == ".gz" else path.suffixes[-1:]).lower()
    if suffix in (".csv", ".tsv", ".csv.gz", ".tsv.gz"):
        return open_delimited
    if suffix in (".parquet", ".pq"):
        return open_parquet
    if suffix == ".npz":
        return open_npz
    if suffix == ".xlsx":
        return open_excel
    advice = {
        ".txt": "name it .csv if commas or semicolons separate its values, .tsv if tabs do",
        ".xls": "save it as .xlsx, or export the sheet as CSV (in Excel: CSV UTF-8)",
        ".npy": "save it with names: numpy.savez(path, x=x, y=y)",
    }.get(suffix, "convert it")
    raise ValueError(f"Expected a .csv, .tsv, .csv.gz, .parquet, .xlsx or .npz file, got {path}; {advice}")


def _check_head(path: Path, head: bytes, reader: Callable[[Path, int], Source]) -> None:
    """Refuse what is empty or plainly of another format."""
    if not head.strip():
        raise ValueError(f"{path} is empty; expected a table with a header")
    if reader is open_parquet and not head.startswith(b"PAR1"):
        raise ValueError(f"{path} is not a Parquet file; if it is text, name it .csv")
    if reader is open_npz and not head.startswith(b"PK"):
        raise ValueError(f"{path} is not an npz file; write it with numpy.savez")
    if reader is open_excel and not head.startswith(b"PK"):
        raise ValueError(f"{path} is not an Excel file of the format .xlsx; if it is text, name it .csv")
    if reader is not open_delimited:
        return
    if path.suffix.lower() == ".gz":
        if not head.startswith(b"\x1f\x8b"):
            raise ValueError(f"{path} is not compressed by gzip; drop the suffix .gz")
        return
    others = {
        b"PAR1": "a Parquet file; name it .parquet",
        b"PK\x03\x04": "a zip archive; name it .xlsx if Excel wrote it, .npz if NumPy did",
        b"\x1f\x8b": "compressed by gzip; name it .csv.gz",
        b"\xff\xfe": "text in UTF-16; save it as UTF-8 (in Excel: CSV UTF-8)",
        b"\xfe\xff": "text in UTF-16; save it as UTF-8 (in Excel: CSV UTF-8)",
    }
    for start, what in others.items():
        if head.startswith(start):
            raise ValueError(f"{path} is {what}")
    if b"\0" in head:
        raise ValueError(f"{path} holds binary data (NUL bytes); save the table as text in UTF-8")


def as_expected(table: pa.Table, expected: Mapping[str, Kind], path: str, first_row: int) -> pa.Table:
    """A batch with its columns converted; `first_row` is what errors call its first row."""
    return pa.table(
        {
            name: converted(column, expected[name], name, path, first_row) if name in expected else column
            for name, column in zip(table.column_names, table.columns, strict=True)
        }
    )
