"""Columns that differ as a whole from those of the training rows: a file of new rows beside them.

A number is compared by the two-sample Kolmogorov–Smirnov test of its values, a category by the χ² test of its levels,
and each by the share of missing cells (Fisher's exact test). A column counts as different if Holm's procedure rejects
over the tests of all columns, so that ordinary rows have any such column with a probability of `level` at most, and
if the difference is large enough to matter: with many rows the smallest is certain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import kolmogorov  # scipy.stats takes a second to import: fitting needs none
from torch import Tensor

from dapcal.amounts import amount
from dapcal.tables.columns import Category, Number
from dapcal.tables.dates import Date
from dapcal.tables.encoder import Encoder

_LEVEL = 0.05
_SMALLEST = 0.05  # difference of shares, or of distribution functions, that is worth a word
_EXPECTED = 5.0  # rows that a level must be expected to have, for the χ² test
_SURELY = 0.25, 10.0  # a p-value by Kolmogorov's limit with so many rows, at which the exact one is far above `_LEVEL`
_ABOUT = 2.0, 100.0  # times the exact p-value that one by that limit is at most, down to 1e-8, with so many rows
_TOLD = 8  # columns
FEWEST = 20  # new rows
MOST = 5000  # rows that are compared


class Drift(NamedTuple):
    """A column that differs from training."""

    column: str
    what: str  # in words
    difference: float  # of distribution functions or of shares, from 0 to 1
    p_value: float  # of the test alone, before Holm


class _Tested(NamedTuple):
    """A test of a column."""

    column: str
    difference: float
    p_value: float
    what: Callable[[], str]  # words, which few columns need
    exact: Callable[[], tuple[float, float]] | None = None  # difference and p-value, where these are about right

    def exactly(self) -> _Tested:
        """The same with exact numbers."""
        if self.exact is None:
            return self
        difference, p_value = self.exact()
        return self._replace(difference=difference, p_value=p_value, exact=None)


class Sample:
    """A random sample of the rows of a stream, of bounded size (Vitter's algorithm R)."""

    def __init__(self, most: int = MOST, seed: int = 0) -> None:
        self.most, self.seed, self.seen = most, seed, 0
        self.rows: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        """Rows (N, P) that come next."""
        rows = drawn(self.seen, len(x), self.most, self.seed).rows
        self.add_drawn(x[torch.from_numpy(rows).to(x.device)], len(x))

    def add_drawn(self, x: Tensor, count: int) -> None:
        """Of `count` rows that come next those that `drawn` names, (rows, P)."""
        places = drawn(self.seen, count, self.most, self.seed).places
        for place, row in zip(places.tolist(), x, strict=True):
            self.rows[place : place + 1] = [row]  # one that is there already, or the next
        self.seen += count

    def __call__(self) -> Tensor:
        """(at most `most`, P)."""
        return torch.stack(self.rows)


class Drawn(NamedTuple):
    """Rows of a batch that a sample takes up, and whose places they take, both (rows,)."""

    rows: np.ndarray
    places: np.ndarray


def drawn(seen: int, count: int, most: int = MOST, seed: int = 0) -> Drawn:
    """Which of `count` rows a sample takes up after it has seen so many: known without what came before them."""
    after = np.arange(seen + 1, seen + count + 1)  # rows seen, this one among them
    places = np.random.default_rng([seed, seen]).integers(after)
    places = np.where(after <= most, after - 1, places)
    rows = np.flatnonzero(places < most)
    return Drawn(rows, places[rows])


def drifts(encoder: Encoder, train: Tensor, new: Tensor) -> list[Drift]:
    """Columns that differ, the largest difference first; none where there are too few new rows to tell.

    Args:
        encoder: the columns.
        train: encoded training rows (T, P).
        new: encoded new rows (N, P).
    """
    if len(new) < FEWEST:
        return []
    train, new = (thinned(x).cpu() for x in (train, new))
    tested: list[_Tested] = []
    start = 0
    for column in encoder.columns:
        places = slice(start, start + column.width)
        before, after = train[:, places].numpy(), new[:, places].numpy()
        tested += _category(column, before, after) if isinstance(column, Category) else _number(column, before, after)
        start += column.width
    if all(test.p_value > _ABOUT[0] * _LEVEL / len(tested) for test in tested):
        return []  # Holm's procedure ends with the smallest of them, whatever exact ones are
    tested = [test.exactly() for test in tested]
    found: dict[str, _Tested] = {}
    for rank, test in enumerate(sorted(tested, key=lambda one: one.p_value)):
        if test.p_value > _LEVEL / (len(tested) - rank):  # Holm: here and from here on nothing is rejected
            break
        if test.difference >= _SMALLEST and test.difference > getattr(found.get(test.column), "difference", 0.0):
            found[test.column] = test
    largest = sorted(found.values(), key=lambda one: -one.difference)
    return [Drift(one.column, one.what(), one.difference, one.p_value) for one in largest]


def words(found: Sequence[Drift]) -> list[str]:
    """A sentence for each of the columns that differ most."""
    return [f"Column `{one.column}` differs from training as a whole: {one.what}" for one in found[:_TOLD]]


def thinned(x: Tensor) -> Tensor:
    """Rows (N, P) that are compared: all of them, or a random sample that is always the same."""
    if len(x) <= MOST:
        return x
    return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:MOST].to(x.device)]


def _stats() -> Any:
    """SciPy's tests."""
    from scipy import stats

    return stats


def _number(column: Number | Date, train: np.ndarray, new: np.ndarray) -> list[_Tested]:
    blank = [x[:, 1] > 0.5 if column.marked else np.zeros(len(x), bool) for x in (train, new)]
    values = [x[~missing, 0] for x, missing in zip((train, new), blank, strict=True)]
    found = _missing(column.name, *blank)

    def what() -> str:
        before, after = (_shown(column, float(np.median(part.astype(float)))) for part in values)
        if before != after:
            return f"median {before} in training, {after} here"
        place = float(_stats().ks_2samp(*values, method="asymp").statistic_location)  # where they differ most
        shares = [100 * float((part <= place).mean()) for part in values]
        return f"at most {_shown(column, place)} are {shares[0]:.0f} % in training, {shares[1]:.0f} % here"

    if all(len(part) for part in values):
        found.append(_same_distribution(column.name, values[0], values[1], what))
    return found


def _same_distribution(name: str, one: np.ndarray, two: np.ndarray, what: Callable[[], str]) -> _Tested:
    """By the largest difference of distribution functions; its p-value is Kolmogorov's limit, which is quick to have.

    The limit is what counts where it is large, and a first look where it is small; of few rows it says nothing.
    """
    one, two = np.sort(one), np.sort(two)
    both = np.concatenate([one, two])
    shares = [np.searchsorted(part, both, side="right") / len(part) for part in (one, two)]
    difference = float(np.abs(shares[0] - shares[1]).max())
    rows = len(one) * len(two) / len(both)
    p_value = float(kolmogorov(np.sqrt(rows) * difference))
    found = _Tested(name, difference, p_value, what, partial(_exact, one, two))
    if p_value > _SURELY[0] and rows >= _SURELY[1]:
        return found._replace(exact=None)
    return found if rows >= _ABOUT[1] else found.exactly()


def _exact(one: np.ndarray, two: np.ndarray) -> tuple[float, float]:
    test = _stats().ks_2samp(one, two, method="asymp")
    return float(test.statistic), float(test.pvalue)


def _shown(column: Number | Date, value: float) -> str:
    return column.shown(value) if isinstance(column, Date) else amount(column.center + column.scale * value)


def _category(column: Category, train: np.ndarray, new: np.ndarray) -> list[_Tested]:
    train, new = (x[:, : column.indicators] for x in (train, new))
    blank = [np.zeros(len(x), bool) if column.mark is None else x[:, column.mark] > 0.5 for x in (train, new)]
    levels = [x[~missing].argmax(1) for x, missing in zip((train, new), blank, strict=True)]
    found = _missing(column.name, *blank)
    if all(len(part) for part in levels):
        counts = np.stack([np.bincount(part, minlength=column.indicators) for part in levels])  # (2, levels)
        shares = counts / counts.sum(1, keepdims=True)

        def what() -> str:
            largest = int(np.abs(shares[1] - shares[0]).argmax())
            name = column.decode(np.eye(column.indicators)[[largest]])[0]
            return f"{name!r} {100 * shares[0, largest]:.0f} % in training, {100 * shares[1, largest]:.0f} % here"

        difference = float(np.abs(shares[1] - shares[0]).sum() / 2)
        found.append(_Tested(column.name, difference, _chi_squared(counts), what))
    return found


def _missing(name: str, train: np.ndarray, new: np.ndarray) -> list[_Tested]:
    """Nothing is asked where nothing is missing."""
    if not (train.any() or new.any()):
        return []
    table = [[int(x.sum()), int((~x).sum())] for x in (train, new)]
    before, after = float(train.mean()), float(new.mean())
    what = f"missing in {100 * before:.0f} % of the rows in training, {100 * after:.0f} % here"
    return [_Tested(name, abs(after - before), float(_stats().fisher_exact(table)[1]), lambda: what)]


def _chi_squared(counts: np.ndarray) -> float:
    """p-value of equal shares of levels, counts (2, levels); levels that are too rare for it count as one."""
    expected = counts.sum(0) * counts.sum(1).min() / counts.sum()
    rare = expected < _EXPECTED
    merged = np.concatenate([counts[:, ~rare], counts[:, rare].sum(1, keepdims=True)], 1)
    merged = merged[:, merged.sum(0) > 0]
    return float(_stats().chi2_contingency(merged)[1]) if merged.shape[1] > 1 else 1.0
