"""A random sample of the rows of a table that is too large to hold, by one pass over it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dapcal.tables.fitting import are_ids
from dapcal.tables.values import is_number, numbers

MOST_CELLS = 20_000_000  # of a table that is held as a whole
MOST_ROWS = 50_000  # of a sample, which has no more than `MOST_CELLS` cells either


class Sample(NamedTuple):
    """Rows of a table, in its order.

    Attributes:
        table: the rows.
        places: where they stand in the table, from 0, ascending.
        rows: of the table.
    """

    table: pa.Table
    places: np.ndarray
    rows: int

    @property
    def is_all(self) -> bool:
        """Whether no row is missing."""
        return len(self.places) == self.rows

    def others(self, batches: Iterable[pa.Table]) -> Iterator[pa.Table]:
        """Of all rows, batch by batch, those that are not in the sample."""
        first = 0
        for batch in batches:
            start, end = np.searchsorted(self.places, (first, first + len(batch)))
            others = np.ones(len(batch), bool)
            others[self.places[start:end] - first] = False
            first += len(batch)
            yield batch.filter(pa.array(others))

    def counters(self) -> list[str]:
        """Columns of a sample that number the rows of the table: whole numbers that rise, no more than one a row.

        In any other order they are ids by the rule of a whole table, `dapcal.tables.fitting.are_ids`.
        """
        return [] if self.is_all else [name for name in self.table.column_names if self._counts(name)]

    def _counts(self, name: str) -> bool:
        column = self.table[name]
        if not is_number(column.type) or column.null_count:
            return False
        values = numbers(column, name)
        if are_ids(values, self.rows):
            return True
        rises = bool((values == np.round(values)).all() and (np.diff(values) > 0).all())
        return rises and values[-1] - values[0] < self.rows


def drawn(batches: Iterable[pa.Table], seed: int) -> Sample:
    """All rows where they are few, else as many as may be, each with the same chance.

    Every row draws a number, and those with the smallest ones stay. Memory: twice the sample.
    """
    generator = np.random.default_rng(seed)
    tables: list[pa.Table] = []
    keys, places = np.empty(0), np.empty(0, np.int64)
    rows, highest = 0, np.inf
    for batch in batches:
        own = generator.random(len(batch))
        stay = own < highest
        tables.append(batch if stay.all() else batch.filter(pa.array(stay)))
        keys, places = np.append(keys, own[stay]), np.append(places, rows + np.flatnonzero(stay))
        rows += len(batch)
        width = max(batch.num_columns, 1)
        most = max(1, min(MOST_ROWS, MOST_CELLS // width))
        if rows * width > MOST_CELLS and (len(keys) > 2 * most or np.isinf(highest)):
            tables, keys, places = _smallest(tables, keys, places, most)
            highest = keys.max()
    if np.isfinite(highest):
        tables, keys, places = _smallest(tables, keys, places, most)
    return Sample(pa.concat_tables(tables), places, rows)


def _smallest(
    tables: list[pa.Table], keys: np.ndarray, places: np.ndarray, most: int
) -> tuple[list[pa.Table], np.ndarray, np.ndarray]:
    """Rows with the smallest keys, in their order."""
    if len(keys) <= most:
        return tables, keys, places
    stay = np.sort(np.argpartition(keys, most - 1)[:most])
    return [pa.concat_tables(tables).combine_chunks().take(pa.array(stay))], keys[stay], places[stay]
