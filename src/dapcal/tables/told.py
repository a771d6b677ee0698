"""Notes on how columns were read, which travel with a table as metadata of its columns."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

_KEY = b"dapcal.note"


def with_notes(table: pa.Table, notes: Mapping[str, str | None]) -> pa.Table:
    """The same table, whose columns know what was decided about them."""
    fields = [
        field.with_metadata({_KEY: note.encode()}) if (note := notes.get(field.name)) else field
        for field in table.schema
    ]
    return table.cast(pa.schema(fields))


def note_of(table: pa.Table, name: str) -> list[str]:
    """The note on a column, if there is one.

    >>> note_of(with_notes(pa.table({"a": [1.0]}), {"a": "column `a`: 'unknown' taken as missing"}), "a")
    ["column `a`: 'unknown' taken as missing"]
    """
    metadata = table.schema.field(name).metadata or {}
    return [metadata[_KEY].decode()] if _KEY in metadata else []
