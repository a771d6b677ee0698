"""What had to be made up for in rows, in words: the same in a file and in a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dapcal.tables.columns import Category, listed, nearest
from dapcal.tables.encoder import Encoder
from dapcal.tables.values import MISSING, short

_BLANK = {
    True: "it counts as a category of its own",
    False: "there the most frequent category stands for it",  # files of earlier versions
}
_SHOWN = 3  # levels that training never saw
_ALIKE = 0.75  # a level and the one that was meant: Pakistan is not a misspelt Spain


def notes(
    encoder: Encoder, unknown: Mapping[str, Counter[str]], imputed: Mapping[str, int], ignored: Iterable[str]
) -> list[str]:
    """A sentence each for columns with values that training never saw or never lacked, and one for unknown columns.

    Args:
        encoder: the columns.
        unknown: column: levels that training never saw, and their rows.
        imputed: column: rows without a value, where training had none such.
        ignored: columns that the model does not know.
    """
    levels = {c.name: (*c.levels, *c.rare) for c in encoder.columns if isinstance(c, Category)}
    marked = {column.name: column.marked for column in encoder.columns}
    told = [
        f"column `{name}`: {_rows(found.total())} with a category that training never saw "
        f"({_spellings(found, levels[name])}), further from every training row for it"
        for name, found in unknown.items()
    ]
    for name, count in imputed.items():
        filled = _BLANK[marked[name]] if encoder.expected[name] == "category" else "there the mean stands for it"
        told.append(f"column `{name}`: {_rows(count)} without a value, none in training; {filled}")
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
        met = {n: Counter(v for v in (_value(row.get(n)) for row in rows) if v not in s) for n, s in self.seen.items()}
        unknown = {name: found for name, found in met.items() if found}
        others = dict.fromkeys(name for row in rows for name in row if name not in self.known)
        found = notes(self.encoder, unknown, imputed, [name for name in others if name not in self.left_out])
        left_out = [name for name in others if name in self.left_out]
        if left_out:
            found.append(f"columns that nothing is predicted from were ignored: {listed(left_out)}")
        return found


def ignored_note(names: Iterable[str]) -> list[str]:
    """A note on columns that a model does not know; none where there are none."""
    unknown = list(names)
    return [f"columns that the model does not know were ignored: {listed(unknown)}"] if unknown else []


def _value(value: Any) -> Any:
    """As `dapcal.tables.values.texts` has it."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text in MISSING:
        return None
    return text.lower() if text in ("True", "TRUE", "False", "FALSE") else text


def _spellings(found: Counter[str], known: Sequence[str]) -> str:
    """The most frequent of unknown levels, each with the known one that was probably meant."""
    texts = []
    for level, _ in found.most_common(_SHOWN):
        is_word = any(map(str.isalpha, level))  # of codes every one is near another
        near = nearest(level, known, _ALIKE) if is_word else None
        texts.append(short(level) + (f"; did you mean {short(near)}?" if near else ""))
    return ", ".join(texts) + (", …" if len(found) > _SHOWN else "")


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"
