"""Was anything made worse? One-sided tests of paired differences against a tolerance, corrected after Holm.

Differences count as harm: positive = worse. A case is harmed where it is established that its harm is larger than what
is tolerated, not where it merely cannot be ruled out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

ALPHA = 0.05


class Paired(NamedTuple):
    """Mean of paired differences, and how sure it is."""

    mean: float
    error: float  # standard error
    freedom: float  # of Student's t; infinite, the normal distribution, for an error over test rows


class Judged(NamedTuple):
    """One of several differences that are tested together."""

    p_value: float  # corrected, of "the harm is at most what is tolerated"
    bound: float  # the harm is larger than this, at the level that Holm gives it
    harmed: bool


def paired(differences: Sequence[float], row_error: float = math.nan) -> Paired:
    """Over seeds or splits; a single one has the standard error over its test rows."""
    count = len(differences)
    mean = math.fsum(differences) / count
    if count == 1:
        return Paired(mean, row_error, math.inf)
    variance = math.fsum((value - mean) ** 2 for value in differences) / (count - 1)
    return Paired(mean, math.sqrt(variance / count), count - 1)


def judge(found: Sequence[Paired], limit: float, alpha: float = ALPHA) -> list[Judged]:
    """Test all of them at once: the chance that any is called harmed that is not is at most `alpha` (Holm, 1979).

    Args:
        found: harms.
        limit: harm that is tolerated.
        alpha: of the family.
    """
    raw = [p_value(one, limit) for one in found]
    return [
        Judged(corrected, lower_bound(one, level), corrected <= alpha)
        for one, corrected, level in zip(found, holm(raw), holm_levels(raw, alpha), strict=True)
    ]


def p_value(one: Paired, limit: float) -> float:
    """Of Student's t for "the mean is at most `limit`"; without any spread it is known whether it is."""
    from scipy.stats import t

    if one.error == 0:
        return float(one.mean <= limit)
    return float(t.sf((one.mean - limit) / one.error, one.freedom))


def lower_bound(one: Paired, level: float) -> float:
    """What the mean is larger than, with confidence 1 − level."""
    from scipy.stats import t

    return one.mean if one.error == 0 else one.mean - float(t.isf(level, one.freedom)) * one.error


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrected p-values: max over the i-th smallest and those before it of (m − i + 1) p, at most 1.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03, 0.005])]
    [0.03, 0.06, 0.06, 0.02]
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(_ascending(p_values)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def holm_levels(p_values: Sequence[float], alpha: float = ALPHA) -> list[float]:
    """The level that each is compared with, alpha / (m − i + 1) for the i-th smallest.

    >>> [round(level, 4) for level in holm_levels([0.01, 0.04, 0.03, 0.005])]
    [0.0167, 0.05, 0.025, 0.0125]
    """
    levels = [0.0] * len(p_values)
    for rank, place in enumerate(_ascending(p_values)):
        levels[place] = alpha / (len(p_values) - rank)
    return levels


def _ascending(values: Sequence[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda place: values[place])
