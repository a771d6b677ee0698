"""Cells of the results page: numbers with their errors, the paper's beside them, marks, and tables of cells."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from dapcal.experiments.gap.summary import spread

POINTS = 2.0  # percentage points from which a difference to the paper is marked
ERRORS = 2.0  # standard errors beyond which a difference is marked
UP, DOWN = "▲", "▼"
NOTHING = "–"


class Number(NamedTuple):
    """A mean over seeds or splits."""

    mean: float
    error: float  # its standard error; NaN for one value


def number(values: Sequence[float | None], scale: float = 1.0) -> Number | None:
    """Mean and standard error; None without values, NaN where one of them is not finite (null in the files).

    >>> number([0.1, 0.3], scale=100)
    Number(mean=20.0, error=10.0)
    """
    if not values:
        return None
    known = [scale * value for value in values if value is not None]
    if len(known) < len(values):
        return Number(math.nan, math.nan)
    found = spread(known)
    return Number(found["mean"], found["error"])


def show(found: Number | None, digits: int | None = None, sign: bool = False) -> str:
    """`94.2 ± 0.1`, with so many decimals, or with as many as two digits of the error need.

    >>> show(Number(-46.72, 28.88)), show(Number(-2.8634, 0.0968)), show(Number(3.14159, math.nan), 2)
    ('−47 ± 29', '−2.863 ± 0.097', '3.14')
    """
    if found is None:
        return NOTHING
    if math.isnan(found.mean):
        return "not finite"
    digits = _decimals(found) if digits is None else digits
    shown = decimal(found.mean, digits, sign)
    return shown if math.isnan(found.error) else f"{shown} ± {found.error:.{digits}f}"


def decimal(value: float, digits: int, sign: bool = False) -> str:
    """A number with a true minus, and no minus before zero."""
    shown = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    return (shown if float(shown) else shown.lstrip("+-")).replace("-", "−")


def power(value: float) -> str:
    """A positive number whose size may be anything: `0.021`, `6·10⁻³⁰`.

    >>> power(0.0206), power(5.7e-30), power(0.0)
    ('0.021', '6·10⁻³⁰', '0')
    """
    if value == 0 or value >= 1e-3:
        return f"{value:.2g}"
    digit, exponent = f"{value:.0e}".split("e")
    return f"{digit}·10{str(int(exponent)).translate(_RAISED)}"


def median(values: Sequence[float]) -> float:
    """Of seeds or splits, where a mean would be one of them alone."""
    return statistics.median(values)


def mark(difference: float, error: float, least: float = 0.0) -> str:
    """▲ or ▼ for a difference larger than `least` and than two standard errors (where there is one)."""
    beyond = 0.0 if math.isnan(error) else ERRORS * error
    if not abs(difference) > max(least, beyond):
        return ""
    return f" {UP}" if difference > 0 else f" {DOWN}"


def beside(found: Number | None, published: float | None, digits: int) -> str:
    """Per cent of ours, the paper's in brackets, and a mark where they differ.

    >>> beside(Number(86.1, 0.7), 70.31, 1), beside(Number(68.0, 3.0), 67.65, 1)
    ('86.1 ± 0.7 (70.31) ▲', '68.0 ± 3.0 (67.65)')
    """
    if found is None or published is None:
        return show(found, digits)
    return f"{show(found, digits)} ({published:.2f}){mark(found.mean - published, found.error, POINTS)}"


def marks(rows: Sequence[Sequence[str]]) -> tuple[int, int]:
    """How many cells have the paper's number beside them, and how many of those are marked."""
    compared = [cell for row in rows for cell in row[1:] if "(" in cell]
    return len(compared), sum(cell.endswith((UP, DOWN)) for cell in compared)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Markdown; the first columns are of words, the others of numbers."""
    if any(len(row) != len(head) for row in rows):
        raise ValueError(f"Expected rows of {len(head)} cells (one for each column), got {sorted(map(len, rows))}")
    lines = [head, [*["---"] * words, *["--:"] * (len(head) - words)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _decimals(found: Number) -> int:
    size = found.error if found.error > 0 else abs(found.mean) / 10  # without an error: three digits of the mean
    return min(4, max(0, 1 - math.floor(math.log10(size)))) if size > 0 else 2


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
