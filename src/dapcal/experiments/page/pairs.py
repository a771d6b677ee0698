"""Image experiments side by side: pairs of an in-distribution and an OOD set, and what every method says of each.

A mean over pairs is of all pairs or it is none: a method that has one missing gets no mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dapcal.experiments.page.cells import Number
from dapcal.experiments.page.files import ImageResults, Row

NEAR = {
    "MNIST": ("Fashion-MNIST", "Omniglot"),
    "Fashion-MNIST": ("MNIST", "Omniglot"),
    "CIFAR-10": ("CIFAR-100", "corruptions"),
}
"""OOD sets that resemble the in-distribution set: grey shapes on black; photographs of things. All others are far."""

LEFT_OUT = ("oracle", "questions")  # parts of the tables that are no methods of their own


class Pair(NamedTuple):
    """An in-distribution set and an OOD set."""

    inside: str
    outside: str

    @property
    def near(self) -> bool:
        """Whether the OOD set resembles the other."""
        return self.outside in NEAR.get(self.inside, ())

    def __str__(self) -> str:
        return f"{self.inside} → {self.outside}"


Key = tuple[str, int]  # file and seed: the same networks
Values = dict[Key, float]


@dataclass(frozen=True, eq=False)
class Compared:
    """One method in all experiments that have it.

    Attributes:
        name: of the method.
        rows: by in-distribution set.
    """

    name: str
    rows: Mapping[str, Row]

    @property
    def ensemble(self) -> bool:
        """Whether it needs several trained networks."""
        return re.match(r"DE\b", self.name) is not None

    def detection(self, pair: Pair, metric: str) -> Values:
        """Of the method's main score, in per cent; empty where it was not measured."""
        row = self.rows.get(pair.inside)
        return {} if row is None else _values(row, ("ood", row.score, pair.outside, metric), 100)

    def test(self, inside: str, metric: str, scale: float = 1) -> Values:
        """A metric of the predictions on test images; empty without probabilities."""
        row = self.rows.get(inside)
        return {} if row is None else _values(row, ("test", metric), scale)

    def seconds(self, inside: str) -> Values:
        """To fit and score."""
        row = self.rows.get(inside)
        return {} if row is None else _values(row, ("seconds",), 1)

    def missing(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Pairs that it was not measured on."""
        return [pair for pair in pairs if not self.detection(pair, "auroc")]


def pairs_of(images: Iterable[ImageResults]) -> list[Pair]:
    """All pairs of the experiments."""
    return [Pair(found.settings["inside"], outside) for found in images for outside in found.outside]


def methods_of(images: Iterable[ImageResults]) -> list[Compared]:
    """All methods but oracles and variants that answer open questions, in the order of the files."""
    rows: dict[str, dict[str, Row]] = {}
    for found in images:
        for name, row in found.rows.items():
            if row.part not in LEFT_OUT:
                rows.setdefault(name, {})[found.settings["inside"]] = row
    return [Compared(name, own) for name, own in rows.items()]


def of_pairs(method: Compared, pairs: Sequence[Pair], metric: str) -> Number | None:
    """Mean over pairs of the means over seeds; None where a pair is missing, or where there is none."""
    return mean_over(pairs, lambda pair: method.detection(pair, metric))


def of_sets(method: Compared, sets: Sequence[str], metric: str, scale: float = 1) -> Number | None:
    """Mean over in-distribution sets of the means over seeds; None where one is missing."""
    return mean_over([Pair(inside, "") for inside in sets], lambda pair: method.test(pair.inside, metric, scale))


def mean_over(pairs: Sequence[Pair], values: Callable[[Pair], Values]) -> Number | None:
    r"""Mean over pairs of means over seeds, with its standard error.

    Pairs of one in-distribution set share their networks, so the error is of its sums $s_i$ over those pairs under
    every seed $i$; sets are independent: $\frac1P \sqrt{\sum_{sets} \mathrm{var}(s) / n}$. NaN with a single seed.
    """
    found = [(pair.inside, values(pair)) for pair in pairs]
    if not found or not all(own for _, own in found):
        return None
    total, variance = 0.0, 0.0
    for inside in dict.fromkeys(inside for inside, _ in found):
        columns = [own for place, own in found if place == inside]
        keys = shared(columns)
        if not keys:
            return None
        mean, error = spread([math.fsum(own[key] for own in columns) for key in keys])
        total, variance = total + mean, variance + error**2
    return Number(total / len(found), math.sqrt(variance) / len(found))


def shared(columns: Sequence[Mapping[Key, Any]]) -> list[Key]:
    """Files and seeds that all columns have, in the order of the first."""
    return [key for key in columns[0] if all(key in own for own in columns)] if columns else []


def spread(values: Sequence[float]) -> Number:
    """Mean and standard error; NaN for the error of one value."""
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Number(mean, math.nan)
    return Number(mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values)))


def _values(row: Row, path: Sequence[str], scale: float) -> Values:
    found = {}
    for run in row.source.runs:
        value: Any = run["rows"].get(row.name)
        for step in path:
            value = value.get(step, _MISSING) if isinstance(value, Mapping) else _MISSING
        if value is not _MISSING:
            found[row.source.name, run["seed"]] = math.nan if value is None else scale * value
    return found


_MISSING = object()
