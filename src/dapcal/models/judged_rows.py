"""What the targets of new rows say of predictions: a table, a sample of the rows for plots, coverage by category."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import bdtr  # scipy.stats takes a second to import
from torch import Tensor

from dapcal.records import LEVEL
from dapcal.tables.columns import Category
from dapcal.tables.encoder import Encoder

FEWEST = 30  # rows of a category whose coverage says something
_BY_CHANCE = 0.05  # how often any category is said to be covered too rarely, where none is


class JudgedClasses(NamedTuple):
    """Rows of a classifier."""

    true: Tensor  # (N,) places of classes
    probabilities: Tensor  # (N, K)


class JudgedNumbers(NamedTuple):
    """Rows of a regression, in the target's unit, (N,) each."""

    true: Tensor
    predicted: Tensor
    lower: Tensor
    upper: Tensor
    is_flagged: Tensor


class GroupCoverage(NamedTuple):
    """How many targets of a category lie inside their intervals."""

    column: str
    category: str
    rows: int
    coverage: float
    is_low: bool  # lower than chance explains, with so many rows and so many categories


@dataclass(frozen=True, eq=False)
class Judged:
    """New rows that have the target.

    Attributes:
        table: what, value, and that of the best answer that looks at no column.
        rows: how many there are.
        sample: some of them, drawn by a fixed seed.
        coverage: of intervals, over all of them; None for classes.
        by_category: coverage of categories with enough rows, lowest first.
    """

    table: tuple[tuple[str, str, str], ...]
    rows: int
    sample: JudgedClasses | JudgedNumbers
    coverage: float | None = None
    by_category: tuple[GroupCoverage, ...] = ()


class CategoryCounts:
    """Rows of every category, and those inside their interval, batch by batch."""

    def __init__(self, encoder: Encoder) -> None:
        self.rows = 0
        self.columns: list[tuple[Category, slice]] = []
        start = 0
        for column in encoder.columns:
            if isinstance(column, Category):
                self.columns.append((column, slice(start, start + column.indicators)))
            start += column.width
        self.counts = [np.zeros((column.indicators, 2), np.int64) for column, _ in self.columns]

    def add(self, x: np.ndarray, is_inside: np.ndarray) -> None:
        """Encoded rows (N, P), and which of them have their target inside the interval (N,)."""
        self.rows += len(x)
        for (_, places), counts in zip(self.columns, self.counts, strict=True):
            category = x[:, places].argmax(1)
            np.add.at(counts, (category, 0), 1)
            np.add.at(counts, (category, 1), is_inside)

    def found(self, level: float = LEVEL) -> tuple[GroupCoverage, ...]:
        """Categories with enough rows, the lowest coverage first; one that all rows belong to says nothing new.

        A category is low if Holm's procedure over all of them rejects that intervals hold `level` of its targets
        (binomial test): where they do, there is any such category with a probability of 5 % at most.
        """
        groups = []
        for (column, _), counts in zip(self.columns, self.counts, strict=True):
            names = column.decode(np.eye(column.indicators))
            for name, (rows, inside) in zip(names, counts.tolist(), strict=True):
                if FEWEST <= rows < self.rows:
                    p_value = float(bdtr(inside, rows, level))
                    groups.append((p_value, GroupCoverage(column.name, name, rows, inside / rows, is_low=False)))
        found, rejects = [], True
        for rank, (p_value, group) in enumerate(sorted(groups)):
            rejects = rejects and p_value <= _BY_CHANCE / (len(groups) - rank)
            found.append(group._replace(is_low=rejects))
        return tuple(sorted(found, key=lambda group: (group.coverage, -group.rows)))
