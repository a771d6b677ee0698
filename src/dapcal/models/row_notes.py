"""What had to be made up for in rows, in words: the same in a file and in a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dapcal.tables.columns import Category, listed
from dapcal.tables.encoder import Encoder
from dapcal.tables.values import MISSING

_LONGEST = 60  # characters of a name that a client made up


def notes(
    encoder: Encoder, unknown: Mapping[str, int], imputed: Mapping[str, int], ignored: Iterable[str]
) -> list[str]:
    """A sentence each for columns with values that training never saw or never lacked, and one for unknown columns.

    Args:
        encoder: the columns.
        unknown: column: rows with a level that training never saw.
        imputed: column: rows without a value, where training had none such.
        ignored: columns that the model does not know.
    """
    told = [
        f"column `{name}`: {_rows(count)} with a category that training never saw, further from every training "
        "row for it"
        for name, count in unknown.items()
    ]
    for name, count in imputed.items():
        filled = "the mean" if encoder.expected[name] == "number" else "the most frequent category"
        told.append(f"column `{name}`: {_rows(count)} without a value, none in training; there {filled} stands for it")
    return told + ignored_note(ignored)


class RowNotes:
    """The same for rows that a service was sent; of those, the target and dropped columns are named too."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.never_missing = [column.name for column in encoder.columns if not column.missing]
        self.seen = {c.name: {None, *c.levels, *c.rare} for c in encoder.columns if isinstance(c, Category)}
        self.known = {column.name for column in encoder.columns}
        self.left_out = {encoder.target, *encoder.dropped}

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Notes on rows {field: value}, with whatever else they hold."""
        imputed = Counter(n for n in self.never_missing for row in rows if _value(row.get(n)) is None)
        unknown = Counter(n for n, seen in self.seen.items() for row in rows if _value(row.get(n)) not in seen)
        others = dict.fromkeys(name for row in rows for name in row if name not in self.known)
        found = notes(self.encoder, unknown, imputed, [name for name in others if name not in self.left_out])
        left_out = [name for name in others if name in self.left_out]
        if left_out:
            found.append(f"columns that nothing is predicted from were ignored: {listed(left_out)}")
        return found


def ignored_note(names: Iterable[str]) -> list[str]:
    """A note on columns that a model does not know; none where there are none."""
    shown = [name if len(name) <= _LONGEST else f"{name[:_LONGEST]}…" for name in names]
    return [f"columns that the model does not know were ignored: {listed(shown)}"] if shown else []


def _value(value: Any) -> Any:
    """As `dapcal.tables.values.texts` has it."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text in MISSING:
        return None
    return text.lower() if text in ("True", "TRUE", "False", "FALSE") else text


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"
