"""The columns behind a flag, in words."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dapcal.calibrate import Calibrated
from dapcal.distances.column_checks import ABOVE, BELOW, FINE, MISSING, RARE, UNLIKE, ColumnChecks
from dapcal.distances.projectors import Identity
from dapcal.explain import FarColumns

_WORDS = {
    ABOVE: "high",
    BELOW: "low",
    FINE: "more decimals than most training rows",
    RARE: "rare or never seen",
    MISSING: "missing",
    UNLIKE: "unlike what the other columns let expect",
}
_FAR = {True: "far from the nearest rows", False: "differs most from the nearest rows"}
ONLY_DOUBT = {True: "no column is far: the row is ambiguous", False: "no column is far: the draws disagree"}
"""What is written of a flag that nothing but doubt is behind, of classes and of numbers."""


def checks_of(calibrated: Calibrated) -> ColumnChecks | None:
    """The checks of columns; None in files of earlier versions."""
    return next((s.metric for s in calibrated.evidence.further if isinstance(s.metric, ColumnChecks)), None)


def unusual(
    calibrated: Calibrated, names: Sequence[str], x: Tensor, most: int = 3, always: bool = False
) -> list[dict[str, str]]:
    """For every row the columns that are unusual by themselves, and what is unusual about them.

    Args:
        calibrated: what predicts.
        names: of the table's columns.
        x: encoded rows (N, P).
        most: columns of a row.
        always: the most unusual column of a row, if none is unusual by itself.
    """
    checks = checks_of(calibrated)
    if checks is None or not len(x):
        return [{} for _ in range(len(x))]
    enough = 0.0 if always else checks.enough()
    return [
        {names[finding.column]: _WORDS[finding.kind] for finding in row if finding.surprise >= enough}
        for row in checks.findings(Identity()(x), most)
    ]


def far(
    columns: FarColumns, x: Tensor, always: bool, calibrated: Calibrated, names: Sequence[str]
) -> list[dict[str, str]]:
    """For every row the columns that are far from its nearest training rows, and that they are, or that one is missing.

    Args:
        columns: what is usual.
        x: encoded rows (N, P).
        always: the column that differs most, if none is far by itself.
        calibrated: what predicts.
        names: of the table's columns.
    """
    if not len(x):
        return []
    checks = checks_of(calibrated)
    blank = [] if checks is None else checks.blank(Identity()(x)).T.tolist()
    missing = [dict(zip(names, row, strict=True)) for row in blank] or [{}] * len(x)
    return [
        {name: _WORDS[MISSING] if own.get(name) else _FAR[is_far] for name, is_far in row.items() if is_far or always}
        for row, own in zip(columns(x), missing, strict=True)
    ]
