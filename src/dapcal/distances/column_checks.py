"""Evidence column by column: one value that no training row would have, however many ordinary ones stand beside it.

A distance over many columns drowns one wrong unit among eighty. So every column of a table is checked by itself, each
check becomes a surprise s = −log p by its tail among training rows (`dapcal.distances.tails`), and a row counts by

    log Σ_checks exp(s) = log Σ 1/p,

the combination of p-values by their harmonic mean (Wilson 2019): nearly the most surprising check, and more where
several agree. It is a score and not yet a p-value: it becomes one on held-out rows that judge, as all evidence does.

The checks of a number: above and below what training rows hold; with more decimals; rare, or never seen, where values
repeat; unlike what the other columns let expect. Of a category: rare, or never seen. Of all columns together: which are
missing. What is usual for a training row is asked of the others, without that row itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.distances.column_statistics import Likeness, Part, Places, Seen, decimals, fit_likeness, fit_seen, places_of
from dapcal.distances.tails import Tails, fit_tails
from dapcal.storing import Stores

_AT_ONCE = 2**13  # numbers whose decimals are looked at at once
_LEVELS_AT_ONCE = 2**20  # inputs of categories that are looked at at once

ABOVE, BELOW, FINE, RARE, MISSING, UNLIKE = "above", "below", "fine", "rare", "missing", "unlike"
"""Kinds of checks: FINE has more decimals, RARE is rare or new, UNLIKE does not fit the other columns."""


@dataclass(frozen=True)
class Columns:
    """Recipe of `ColumnChecks`: a metric that is fitted to training points (T, P).

    Attributes:
        parts: where the inputs of the columns stand.
        copies: inputs that say of a number what it says itself.
    """

    parts: tuple[Part, ...]
    copies: tuple[int, ...] = ()

    def fit_metric(self, points: Tensor, y: Tensor | None) -> ColumnChecks:  # noqa: ARG002
        """Learn what is usual; targets are not looked at."""
        return fit_checks(points, self.parts, self.copies)


class Finding(NamedTuple):
    """The most surprising check of one column at one row."""

    column: int
    kind: str
    surprise: float  # −log p


@dataclass(frozen=True, eq=False)
class ColumnChecks:
    """Surprise of rows, log Σ 1/p over the checks of all columns (a `Metric`; not zero at training rows).

    Attributes:
        parts: the table's columns.
        seen: how often training rows had a value.
        likeness: what numbers are expected to be, given the other columns.
        edges: tails of the checks ABOVE and BELOW.
        tails: of the others.
    """

    stores = Stores()

    parts: tuple[Part, ...]
    seen: Seen
    likeness: Likeness
    edges: Tails
    tails: Tails
    _places: Places = field(init=False, repr=False)

    def __call__(self, points: Tensor) -> Tensor:
        """(N,)."""
        return self.surprises(points).logsumexp(0).to(points.dtype)

    def joint(self, points: Tensor) -> Tensor:
        """Scalar: the most surprising row."""
        return self(points).max()

    def surprises(self, points: Tensor) -> Tensor:
        """−log p of every check, (M, N) in float64, in the order of `checks`."""
        absent = self._places.absent(points)
        edges = self.edges(_edges(points, self._places, absent))
        unlike = self.likeness(self.likeness.compared(edges, points)).masked_fill(absent, -torch.inf)
        statistics = _statistics(points, self._places, self.seen, absent)
        return torch.cat([edges, self.tails(torch.cat([statistics, unlike]))])

    def __post_init__(self) -> None:
        object.__setattr__(self, "_places", places_of(self.parts, self.tails.knots.device))

    @cached_property
    def checks(self) -> list[tuple[int | None, str]]:
        """Column and kind of every check; MISSING is of all columns together."""
        numbers = [place for place, part in enumerate(self.parts) if part.number is not None]
        codes = [place for place, part in enumerate(self.parts) if part.number is None]
        first = [(place, kind) for kind in (ABOVE, BELOW, FINE, RARE) for place in numbers]
        return [*first, *((place, RARE) for place in codes), (None, MISSING), *((place, UNLIKE) for place in numbers)]

    def enough(self, level: float = 0.05) -> float:
        """Surprise that has at most this chance of any check of an ordinary row (Bonferroni)."""
        return math.log(len(self.checks) / level)

    def blank(self, points: Tensor) -> Tensor:
        """Where a value is missing, (columns, N)."""
        return self.seen.blank(points, self._places) > 0

    def findings(self, points: Tensor, most: int = 3, level: float = 0.05) -> list[list[Finding]]:
        """For every row the columns that are surprising by themselves, most surprising first.

        A column is named whose surprise is `enough`, and one in any case.
        Where it is the missing cells that surprise, the rarest of them are named.
        """
        surprises, checks, enough = self.surprises(points).T, self.checks, self.enough(level)
        most_surprising = surprises.argmax(1, keepdim=True)
        rows, places = (surprises >= enough).scatter(1, most_surprising, True).nonzero().T.tolist()
        values = surprises[rows, places].tolist()
        blank = self.seen.blank(points, self._places).T.tolist()  # (N, columns)
        found: list[list[Finding]] = [[] for _ in blank]
        for row, place, value in zip(rows, places, values, strict=True):
            column, kind = checks[place]
            if column is not None:
                found[row].append(Finding(column, MISSING if blank[row][column] > 0 else kind, value))
            else:
                found[row] += [Finding(cell, MISSING, own) for cell, own in enumerate(blank[row]) if own]
        return [_most_surprising(named)[:most] for named in found]


def _most_surprising(named: list[Finding]) -> list[Finding]:
    """Of each column its most surprising finding, most surprising first."""
    first: dict[int, Finding] = {}
    for finding in sorted(named, key=lambda finding: -finding.surprise):
        first.setdefault(finding.column, finding)
    return list(first.values())


def fit_checks(points: Tensor, parts: Sequence[Part], copies: Sequence[int] = ()) -> ColumnChecks:
    """Learn from training points (T, P) what is usual in every column; arguments as in `Columns`."""
    parts = tuple(parts)
    seen = fit_seen(points, parts)
    places = places_of(parts, points.device)
    absent = places.absent(points)
    values = _edges(points, places, absent)
    edges = fit_tails(values, torch.zeros(len(values), dtype=torch.bool))
    surprises = edges(values)
    likeness = fit_likeness(surprises, points, parts, copies)
    compared = likeness.compared(surprises, points)
    unlike = points.new_zeros(len(values) // 2, len(points), dtype=torch.float64)
    for half in (0, 1):  # no row is compared with what was learnt from it
        own = torch.arange(len(points), device=points.device) % 2 == half
        unlike[:, own] = likeness.learnt(compared[:, ~own])(compared[:, own])
    unlike[absent] = -torch.inf
    statistics = torch.cat([_statistics(points, places, seen, absent, itself=1), unlike])
    checks = ColumnChecks(parts, seen, likeness, edges, edges)
    in_nats = torch.tensor([kind in (RARE, MISSING) for _, kind in checks.checks[len(values) :]])
    return ColumnChecks(parts, seen, likeness, edges, fit_tails(statistics, in_nats))


def _decimals(points: Tensor, places: Places) -> Tensor:
    """Of the numbers, (numbers, N), a few rows at a time, which stay close to a core through many short steps."""
    values = points[:, places.numbers].T
    parts = values.split(max(1, _AT_ONCE // max(1, len(values))), 1)
    return torch.cat([decimals(rows, places.center, places.scale) for rows in parts], 1)


def _edges(points: Tensor, places: Places, absent: Tensor) -> Tensor:
    """Values of the numbers, and their negatives, (2 numbers, N); −inf where missing."""
    values = points[:, places.numbers].T
    return torch.cat([values, -values]).masked_fill(absent.repeat(2, 1), -torch.inf)


def _statistics(points: Tensor, places: Places, seen: Seen, absent: Tensor, itself: int = 0) -> Tensor:
    """What the tails of FINE, RARE and MISSING look at, (·, N); `itself`: rows of training that are the row itself."""
    of_numbers = torch.cat([_decimals(points, places), seen.values(points, places, itself)])
    few = points.split(max(1, _LEVELS_AT_ONCE // max(1, places.codes.numel())))
    codes = torch.cat([seen.codes(rows, places, itself) for rows in few], 1)
    blank = seen.blank(points, places, itself).sum(0, keepdim=True)
    return torch.cat([of_numbers.masked_fill(absent.repeat(2, 1), -torch.inf), codes, blank])
