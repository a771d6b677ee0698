"""Texts that a spreadsheet would run: those that begin as a formula does, found and, on request, made harmless.

A label of somebody else's data may be `=HYPERLINK(...)`. A file of predictions holds it as it is; where the file is
opened by a spreadsheet, an apostrophe before it makes it a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

SUFFIXES = (".csv", ".tsv")
"""Files that spreadsheets open."""

_FORMULA = r"^[=+\-@\t\r\x{ff1d}\x{ff0b}\x{ff0d}\x{ff20}]"  # also in full width, which some take for the same
_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"


class Formulas:
    """Counts texts that begin as a formula does; with `escape` each gets an apostrophe before it."""

    def __init__(self, escape: bool) -> None:
        self.escape = escape
        self.found = 0
        self.named = False

    def values(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Columns by name, their texts made harmless where that is asked for; numbers stay as they are."""
        return {name: self._column(values) for name, values in columns.items()}

    def names(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The same columns under names that are harmless."""
        before = self.found
        safe = self._column(pa.array(list(columns), pa.string())).to_pylist()
        if self.named:  # a header counts once, and not with every batch
            self.found = before
        self.named = True
        if len(set(safe)) < len(safe):
            raise ValueError("--excel-safe would write two columns of one name; rename one in the table")
        return dict(zip(safe, columns.values(), strict=True))

    def cells(self, beside: Mapping[str, Any], predicted: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Columns beside the predictions, with their names, and those of the predictions, as they are to be written."""
        return self.names(self.values(beside)), self.values(predicted)

    def note(self) -> str:
        """What was found, in words; empty where nothing was."""
        if not self.found:
            return ""
        texts = "1 text" if self.found == 1 else f"{self.found:,} texts"
        if self.escape:
            return f"{texts} that a spreadsheet would run as a formula now begin with an apostrophe (--excel-safe)"
        return f"{texts} begin as a formula does, which a spreadsheet would run; --excel-safe makes them harmless"

    def _column(self, values: Any) -> Any:
        if isinstance(values, np.ndarray):
            if values.dtype.kind not in "OU":
                return values
            safe = self._column(pa.array([str(value) for value in values], pa.string()))
            return np.array(safe.to_pylist(), object) if self.escape else values
        kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            return values
        plain = values.cast(kind)
        risky = pc.and_not(pc.match_substring_regex(plain, _FORMULA), pc.match_substring_regex(plain, _NUMBER))
        risky = pc.fill_null(risky, False)
        self.found += int(pc.sum(risky).as_py() or 0)
        if not self.escape:
            return values
        return pc.if_else(risky, pc.binary_join_element_wise(pa.scalar("'", kind), plain, pa.scalar("", kind)), plain)
