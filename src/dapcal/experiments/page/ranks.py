r"""Average ranks of methods over blocks, and how far two must be apart to differ (Friedman, Nemenyi).

Of $k$ methods in $N$ blocks with average ranks $R_j$ (1 is the best, ties share theirs), Friedman's statistic is
$\chi^2 = \frac{12 N}{k (k + 1)} \sum_j (R_j - \frac{k + 1}{2})^2$, divided by its value without ties' correction, and
two methods differ where $|R_i - R_j|$ reaches $CD = \frac{q_\alpha}{\sqrt 2} \sqrt{\frac{k (k + 1)}{6 N}}$, with
$q_\alpha$ the quantile of the studentized range for $k$ groups and infinitely many degrees of freedom. See Demšar,
"Statistical comparisons of classifiers over multiple data sets" (2006).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dapcal.experiments.page.pairs import Compared, Key, Pair, shared

ALPHA = 0.05


class Ranks(NamedTuple):
    """Methods with their average ranks, the best first."""

    names: tuple[str, ...]
    average: tuple[float, ...]
    blocks: int
    p_value: float  # of Friedman's test
    critical: float  # difference

    @property
    def cliques(self) -> list[tuple[int, int]]:
        """First and last place of each longest run of methods that do not differ, of two at least."""
        ends = [
            max(last for last, rank in enumerate(self.average) if rank - own < self.critical) for own in self.average
        ]
        return [
            (first, last) for first, last in enumerate(ends) if last > first and (first == 0 or ends[first - 1] < last)
        ]


def compared(methods: Sequence[Compared], pairs: Sequence[Pair]) -> Ranks | None:
    """By AUROC, over all pairs under all seeds that every method with all pairs has; None with fewer than two."""
    complete = [method for method in methods if not method.missing(pairs)]
    blocks = [(pair, key) for pair in pairs for key in _keys(complete, pair)]
    if len(complete) < 2 or len(blocks) < 2:
        return None
    values = [[method.detection(pair, "auroc")[key] for method in complete] for pair, key in blocks]
    return friedman([method.name for method in complete], values)


def friedman(names: Sequence[str], values: Sequence[Sequence[float]]) -> Ranks:
    """Ranks of the columns of a table with one line for each block; high values are good."""
    from scipy.stats import chi2, rankdata, studentized_range

    ranks = [rankdata([-value for value in line]).tolist() for line in values]
    count, number = len(values), len(names)
    average = [math.fsum(line[place] for line in ranks) / count for place in range(number)]
    middle = (number + 1) / 2
    between = 12 * count / (number * (number + 1)) * math.fsum((rank - middle) ** 2 for rank in average)
    ties = math.fsum(line.count(rank) ** 2 - 1 for line in ranks for rank in line)  # Σ t³ − t over groups of t
    correction = 1 - ties / (count * number * (number**2 - 1))
    p_value = float(chi2.sf(between / correction, number - 1)) if correction > 0 else 1.0
    quantile = float(studentized_range.ppf(1 - ALPHA, number, math.inf)) / math.sqrt(2)
    critical = quantile * math.sqrt(number * (number + 1) / (6 * count))
    order = sorted(range(number), key=average.__getitem__)
    return Ranks(tuple(names[i] for i in order), tuple(average[i] for i in order), count, p_value, critical)


def _keys(methods: Sequence[Compared], pair: Pair) -> list[Key]:
    return shared([method.detection(pair, "auroc") for method in methods])
