"""How a column is encoded, learnt from the training rows; a column that is of no use, or needs work first, is told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from shlex import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dapcal.amounts import amount
from dapcal.tables.columns import MAX_LEVELS, Category, Number
from dapcal.tables.date_texts import are_dates, are_times
from dapcal.tables.dates import Date, days_of, fit_date
from dapcal.tables.magnitudes import fit_magnitude
from dapcal.tables.values import is_number, is_text, numbers, short, texts

OPEN = 0.05  # chance that a new row has a new level, beyond which that is nothing unusual
MANY_ONCE = 10  # levels that one row has, of which that chance is told
FEWEST = 5  # rows of a level that has a column of its own, where new levels are to be expected

_FEWEST_IDS = 60  # numbers; of as few or fewer, all may well be different by chance
_LONGEST_IDS = 4  # times the rows, over which ids spread at most: three of four may lie in another file
_REPEATS = 7  # numbers that occur twice, of which chance would give as many: it gives none with chance exp(−7)
_YEARS = 1800, 2100
_ALL_DIGITS = 15  # of a number as the file has it


def fit_column(
    values: pa.ChunkedArray, name: str, learnt: bool = False, places: np.ndarray | None = None
) -> tuple[Number | Category | Date | None, str | None]:
    """A fitted column, or None if it is of no use; and what there is to say about it.

    Args:
        values: of all rows, which say what kind of column it is, whether it is of use, and in which unit it is counted.
        name: of the column.
        learnt: whether numbers are learnt even if they look like ids.
        places: of the rows that say which levels there are and whether a cell may be missing; by default all.
    """
    seen = values if places is None else values.take(places)
    if not len(seen.drop_null()):
        return None, _no_values(name)
    if pa.types.is_date(values.type) or pa.types.is_timestamp(values.type):
        return _fit_date(values, seen, name)
    if pa.types.is_temporal(values.type):
        raise ValueError(_time_advice(name))
    if is_number(values.type):
        return _fit_number(values, seen, name, learnt)
    if is_text(values.type) or any(
        is_one(values.type) for is_one in (pa.types.is_dictionary, pa.types.is_boolean, pa.types.is_null)
    ):
        text = texts(values, name)
        if are_dates(text):
            if are_times(text):
                raise ValueError(_time_advice(name))
            return _fit_date(values, seen, name)
        return _fit_category(text, text if places is None else text.take(places), name)
    raise ValueError(
        f"Column `{name}` holds {values.type}, which is neither number nor text; leave it out with --drop {quote(name)}"
    )


def mean_and_deviation(values: np.ndarray, name: str) -> tuple[float, float]:
    """Mean and standard deviation, which is exactly 0 where the values are constant up to rounding."""
    with np.errstate(over="ignore", invalid="ignore"):
        mean, deviation = float(values.mean()), float(values.std())
    largest = float(np.abs(values).max())
    if not (math.isfinite(mean) and math.isfinite(deviation)):
        raise ValueError(f"Column `{name}` holds numbers up to {largest:.3g}, too large to standardise; rescale it")
    return mean, deviation if deviation > 8 * np.finfo(np.float64).eps * largest else 0.0


def are_ids(values: np.ndarray, rows: int | None = None) -> bool:
    """Whether numbers (N,) name rows: whole, all different, and so close together that chance would repeat some.

    Of N numbers drawn from a span of R, N²/2R pairs are equal on average (the birthday problem). Ids are learnt by
    heart, and those of new rows are unlike all that was learnt. Years (1800 to 2100) are not taken for ids: there may
    be one row a year, and a trend in it.

    Args:
        values: none of them missing.
        rows: of the table, if these are a sample of it.
    """
    least, greatest = values.min(), values.max()
    pairs = len(values) * (len(values) - 1) / 2
    span = greatest - least
    if len(values) <= _FEWEST_IDS or not span < _LONGEST_IDS * (rows or len(values)) or pairs < _REPEATS * span:
        return False
    if _YEARS[0] <= least and greatest <= _YEARS[1]:
        return False
    return bool((values == np.round(values)).all()) and len(np.unique(values)) == len(values)


def ids_left_out(name: str) -> str:
    """A note."""
    return (
        f"column `{name}` numbers the rows (whole numbers, none of them twice): left out; --number {quote(name)} "
        "learns it"
    )


def alike(levels: Sequence[str], where: str) -> str | None:
    """A note about names that differ in capitals alone."""
    groups: dict[str, list[str]] = {}
    for level in levels:
        groups.setdefault(level.casefold(), []).append(level)
    twins = next((sorted(group) for group in groups.values() if len(group) > 1), None)
    if twins is None:
        return None
    return f"{where} holds {', '.join(map(repr, twins))}, which count as different; spell them alike if they are not"


def _no_values(name: str) -> str:
    return f"column `{name}` has no values: left out"


def _fit_date(values: pa.ChunkedArray, seen: pa.ChunkedArray, name: str) -> tuple[Date, str | None]:
    date, note = fit_date(values, name)
    return replace(date, missing=bool(np.isnan(days_of(seen, name, date.order)).any())), note


def _fit_number(
    values: pa.ChunkedArray, seen: pa.ChunkedArray, name: str, learnt: bool
) -> tuple[Number | None, str | None]:
    all_values = numbers(values, name)
    present = all_values[~np.isnan(all_values)]
    if not len(present):
        return None, _no_values(name)
    center, deviation = mean_and_deviation(present, name)
    note = None
    if not deviation and len(present) == len(all_values) > 1:
        note = _constant(name, amount(present[0], _ALL_DIGITS))
    elif not learnt and len(present) == len(all_values) and are_ids(present):
        return None, ids_left_out(name)
    elif not learnt and len(present) == len(all_values) > 20 and (np.diff(np.sort(present)) == 1).all():
        if present.min() in (0, 1):
            return None, ids_left_out(name)
        note = (  # years, perhaps
            f"column `{name}` is one more from row to row: if it only names them, leave it out with --drop "
            f"{quote(name)}, or every new row will look far from the training data"
        )
    known = numbers(seen, name)
    missing = np.isnan(known)
    magnitude = fit_magnitude(known[~missing])
    if magnitude is not None:
        note = note or f"column `{name}` goes over orders of magnitude: its logarithm counts beside it"
    return Number(name, center, deviation or 1.0, missing=bool(missing.any()), magnitude=magnitude), note


def _fit_category(text: pa.ChunkedArray, seen: pa.ChunkedArray, name: str) -> tuple[Category | None, str | None]:
    present = text.drop_null()
    distinct = len(present.unique())
    if distinct > max(10, len(present) / 2) and pc.mean(pc.count_substring(present, " ")).as_py() >= 3:
        raise ValueError(
            f"Column `{name}` holds free text ({distinct:,} different texts in {len(present):,} rows); make numbers or "
            f"categories of it, or leave it out with --drop {quote(name)}"
        )
    if distinct == len(present) > 10:
        return None, f"column `{name}` is different in every row, so it names rows: left out"
    known = seen.drop_null()
    if not len(known):
        return None, _no_values(name)
    rows = {n["values"]: n["counts"] for n in pc.value_counts(known).to_pylist()}
    counts = sorted((-n["counts"], n["values"]) for n in pc.value_counts(present).to_pylist() if n["values"] in rows)
    levels = [level for _, level in counts]
    note = _constant(name, short(levels[0])) if distinct == 1 and len(present) == len(text) > 1 else None
    once = sum(n == 1 for n in rows.values())
    # Good and Turing: a new row is new with chance once/rows
    is_open = once >= MANY_ONCE and once > OPEN * len(known)
    apart = min(sum(n >= FEWEST for n in rows.values()) if is_open else len(levels), MAX_LEVELS)
    if not apart:
        return None, f"column `{name}` has {distinct:,} levels, none of them in {FEWEST} rows: left out"
    if apart < len(levels):
        kept = sum(rows[level] for level in levels[:apart]) / len(known)
        note = (
            f"column `{name}` has {distinct:,} levels: the {apart} most frequent ({100 * kept:.0f} % of the rows) "
            "are told apart, the others count as one" + (", and new ones with them" if is_open else "")
        )
    missing = len(known) < len(seen)
    note = note or alike(levels, f"column `{name}`")
    return Category(name, tuple(levels[:apart]), tuple(levels[apart:]), missing, open=is_open), note


def _constant(name: str, value: str) -> str:
    """It stays, as evidence: a row of another kind than all training rows must not pass as one of them."""
    return f"column `{name}` is {value} in every row: it tells nothing, and another value will count as unusual"


def _time_advice(name: str) -> str:
    return (
        f"Column `{name}` holds times of the day or durations; make numbers of it (hours), or leave it out with --drop "
        f"{quote(name)}"
    )
