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
_PEEK = 2**20  # bytes from which the number of rows is estimated


def read(encoder: Encoder, path: Path, keep: Sequence[str] = ()) -> Source:
    """All rows, a batch at a time, whatever their number; beside them the columns to `keep`."""
    columns = columns_of(path)
    for name in keep:
        if name not in columns:
            raise ValueError(f"There is no column `{name}` in {path} to --keep; there are: {listed(columns)}")
    met = _Met(encoder)

    def batches() -> Iterator[Batch]:
        rows = 0
        for table in stream(path, encoder.expected):
            encoded = encoder(table, rows + 1)
            rows += len(table)
            met.add(encoded)
            targets = table[encoder.target] if encoder.target in columns else None
            yield Batch({name: table[name] for name in keep}, encoded.x, targets)
        if not rows:
            raise ValueError(f"{path} has a header and no rows; there is nothing to predict")

    return Source(batches(), "rows", _expected_rows(path), False, met.notes)


class _Met:
    """What had to be made up for on the way."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.unknown: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.imputed: Counter[str] = Counter()
        self.ignored: tuple[str, ...] = ()

    def add(self, encoded: Encoded) -> None:
        for name, levels in encoded.unknown.items():
            known = self.unknown[name]
            for level, rows in levels.items():
                known[level if level in known or len(known) < _MOST_LEVELS else "…"] += rows
        self.imputed.update(encoded.imputed)
        self.ignored = encoded.ignored

    def notes(self) -> list[str]:
        return notes(self.encoder, self.unknown, self.imputed, self.ignored)


def _expected_rows(path: Path) -> int | None:
    """For the bar: known for Parquet, estimated from the first lines of a text, else unknown."""
    suffix = path.suffix.lower()
    if suffix in (".parquet", ".pq"):
        return int(pyarrow.parquet.read_metadata(path).num_rows)
    if suffix in (".csv", ".tsv"):
        with path.open("rb") as file:
            head = file.read(_PEEK)
        return int(path.stat().st_size * head.count(b"\n") / max(len(head), 1)) or None
    return None
