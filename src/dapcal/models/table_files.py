"""A table's file as batches of encoded rows, and what had to be made up for in them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow.parquet

from dapcal.models.model import Batch, Source
from dapcal.models.row_notes import notes
from dapcal.tables.columns import listed
from dapcal.tables.encoder import Encoded, Encoder
from dapcal.tables.files import columns_of, stream

_MOST_LEVELS = 1000  # unknown ones that are told apart, in bounded memory
_TABLES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet", ".pq")  # that are looked for in a folder
_PEEK = 2**20  # bytes from which the number of rows is estimated


def read(encoder: Encoder, paths: Sequence[Path], keep: Sequence[str] = ()) -> Source:
    """All rows of files, or of those in folders, a batch at a time; beside them the columns to `keep`."""
    paths = files_of(paths)
    check_columns(paths, keep)
    met = Met(encoder)

    def batches() -> Iterator[Batch]:
        for path in paths:
            rows = 0
            for table in stream(path, encoder.expected):
                encoded = encoder(table, rows + 1)
                rows += len(table)
                met.add(encoded)
                targets = table[encoder.target] if encoder.target in table.column_names else None
                yield Batch({name: table[name] for name in keep}, encoded.x, targets)
            if not rows:
                raise ValueError(f"{path} has a header and no rows; there is nothing to predict")

    return Source(batches(), "rows", expected_rows(paths), False, met.notes)


def files_of(paths: Sequence[Path]) -> list[Path]:
    """Files as they are named, and in place of a folder the tables in it, by name."""
    found: list[Path] = []
    for path in paths:
        inside = (
            sorted(one for one in path.iterdir() if one.name.lower().endswith(_TABLES)) if path.is_dir() else [path]
        )
        if not inside:
            raise ValueError(f"{path} is a folder without any table ({', '.join(_TABLES)}); name a file")
        found += inside
    return found


def check_columns(paths: Sequence[Path], keep: Sequence[str]) -> None:
    """Refuse files without a column that is to be kept."""
    for path in paths:
        columns = columns_of(path)
        for name in keep:
            if name not in columns:
                raise ValueError(f"There is no column `{name}` in {path} to --keep; there are: {listed(columns)}")


class Met:
    """What had to be made up for on the way."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.unknown: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.imputed: Counter[str] = Counter()
        self.ignored: tuple[str, ...] = ()

    def add(self, encoded: Encoded) -> None:
        """What was found in the next rows."""
        for name, levels in encoded.unknown.items():
            known = self.unknown[name]
            for level, rows in levels.items():
                known[level if level in known or len(known) < _MOST_LEVELS else "…"] += rows
        self.imputed.update(encoded.imputed)
        self.ignored = encoded.ignored

    def notes(self) -> list[str]:
        """In words."""
        return notes(self.encoder, self.unknown, self.imputed, self.ignored)


def expected_rows(paths: Sequence[Path]) -> int | None:
    """For the bar: known for Parquet, estimated from the first lines of a text, else unknown."""
    found = [_expected_rows(path) for path in paths]
    return None if None in found else sum(filter(None, found))


def _expected_rows(path: Path) -> int | None:
    suffix = path.suffix.lower()
    if suffix in (".parquet", ".pq"):
        return int(pyarrow.parquet.read_metadata(path).num_rows)
    if suffix in (".csv", ".tsv"):
        with path.open("rb") as file:
            head = file.read(_PEEK)
        return int(path.stat().st_size * head.count(b"\n") / max(len(head), 1)) or None
    return None
