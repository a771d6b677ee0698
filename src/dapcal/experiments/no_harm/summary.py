"""Differences of all cases, with their errors, and the verdict over them; from records alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dapcal.experiments.no_harm.measuring import LEVEL
from dapcal.experiments.no_harm.verdict import ALPHA, Judged, Paired, judge, paired

Record = Mapping[str, Any]
Records = Mapping[str, Sequence[Record]]
"""By the name of the case, one for each of its seeds."""


@dataclass(frozen=True)
class Column:
    """What is compared.

    Attributes:
        title: of the table's column.
        value: from one side of a record to the number that is shown.
        loss: of that number, so that less is better.
        outside: whether it is of outliers, which a case may have several kinds of.
        digits: shown after the point.
    """

    title: str
    value: Callable[[Mapping[str, float]], float]
    loss: Callable[[float], float]
    outside: bool = False
    digits: int = 1


def _same(value: float) -> float:
    return value


def _opposite(value: float) -> float:
    return -value


COLUMNS = {
    "accuracy": Column("accuracy (%)", lambda side: 100 * side["accuracy"], _opposite),
    "rmse": Column("RMSE (% of the target's deviation)", lambda side: 100 * side["rmse"], _same),
    "nll": Column("NLL (nats)", lambda side: side["nll"], _same, digits=3),
    "ece": Column("ECE (%)", lambda side: 100 * side["ece"], _same),
    "coverage": Column(
        "coverage of 95 % intervals (%)", lambda side: 100 * side["coverage"], lambda share: abs(share - 100 * LEVEL)
    ),
    "auroc": Column("AUROC (%)", lambda side: 100 * side["auroc"], _opposite, outside=True),
    "fpr95": Column("FPR95 (%)", lambda side: 100 * side["fpr95"], _same, outside=True),
    "gap nll": Column("NLL of the outliers (nats)", lambda side: side["nll"], _same, outside=True, digits=2),
}
LIMITS = {"nll": 0.01, "auroc": 0.5}
"""Harm that is tolerated, of what the verdict is about: nats, and percentage points."""
NO_DOUBT = 50.0
"""AUROC of a score that is the same everywhere: that of one network with one noise level."""
FIRST_SCREEN = "digits: one network"
"""What a reader of the README tries first: its mean NLL may not rise at all."""


class Difference(NamedTuple):
    """One column of one case, for one kind of outliers where it is about those."""

    case: str
    outliers: str
    column: str
    before: float
    after: float
    harm: Paired  # of the loss: positive = worse
    seeds: int

    @property
    def name(self) -> str:
        """The case, and the outliers if there are any."""
        return f"{self.case} ({self.outliers})" if self.outliers else self.case


def differences(records: Records) -> list[Difference]:
    """Every column that the records of a case have, case by case."""
    found = []
    for case, own in records.items():
        for name, column in COLUMNS.items():
            for outliers in own[0]["outliers"] if column.outside else ("",):
                sides = [record["outliers"][outliers] if column.outside else record for record in own]
                if name.removeprefix("gap ") in sides[0]["before"]:
                    found.append(_difference(case, outliers, name, sides))
    return found


def verdict(records: Records) -> dict[str, Any]:
    """For NLL and AUROC: which cases are harmed, and whether the mean over cases is worse than nothing.

    A case's AUROC counts once for every kind of its outliers, so that a gain on one cannot hide a loss on another.
    """
    every = differences(records)
    found = {column: _over_cases([one for one in every if one.column == column], column) for column in LIMITS}
    for one in every:
        if one.case == FIRST_SCREEN and one.column == "nll":
            found[FIRST_SCREEN] = {
                "before": one.before, "after": one.after, "error": one.harm.error, "seeds": one.seeds,
                "passes": one.harm.mean <= 0,
            }  # fmt: skip
    return found


def _difference(case: str, outliers: str, name: str, sides: Sequence[Mapping[str, Any]]) -> Difference:
    column = COLUMNS[name]
    before, after = ([column.value(side[which]) for side in sides] for which in ("before", "after"))
    harms = [column.loss(now) - column.loss(then) for now, then in zip(after, before, strict=True)]
    scale = 100 if name == "auroc" else 1
    alone = scale * sides[0].get("row_errors", {}).get(name, math.nan)
    return Difference(
        case, outliers, name, statistics.fmean(before), statistics.fmean(after), paired(harms, alone), len(sides)
    )


def _over_cases(found: Sequence[Difference], column: str) -> dict[str, Any]:
    limit = LIMITS[column]
    judged = judge([one.harm for one in found], limit)
    alone = [judge([one.harm], limit)[0] for one in found]
    overall = _mean_over_cases(found)
    doubting = [one for one in found if column != "auroc" or one.before != NO_DOUBT]
    return {
        "tested": len(found),
        "limit": limit,
        "harmed": _named(found, judged),
        "harmed if tested alone": _named(found, alone),
        "mean beyond the limit": [one.name for one in found if one.harm.mean > limit],
        "mean harm": overall.mean,
        "its standard error": overall.error,
        "median harm": statistics.median(one.harm.mean for one in found),
        "without doubt before": len(found) - len(doubting),
        "mean harm with doubt before": _mean_over_cases(doubting)._asdict() if doubting else None,
        "passes": not any(one.harmed for one in judged) and not overall.mean > overall.error,
        "alpha": ALPHA,
        "bounds": {one.name: [round(j.bound, 5), round(j.p_value, 5)] for one, j in zip(found, judged, strict=True)},
    }


def _mean_over_cases(found: Sequence[Difference]) -> Paired:
    """Each case counts once, whatever kinds of outliers it has."""
    own: dict[str, list[float]] = {}
    for one in found:
        own.setdefault(one.case, []).append(one.harm.mean)
    return paired([statistics.fmean(harms) for harms in own.values()])


def _named(found: Sequence[Difference], judged: Sequence[Judged]) -> list[str]:
    return [one.name for one, own in zip(found, judged, strict=True) if own.harmed]
