"""From predictions to columns: one row an input, classes by their names, numbers in the unit that people know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dapcal.predictive import Prediction

Columns = dict[str, np.ndarray]
"""By name: one value an input (N,), or one for every class or target (N, K); see `Prediction.columns`."""

_ROUNDING = 2.0**-22  # of float32, twice


class Unit(NamedTuple):
    """A regression's targets as people see them: center + scale · the network's target."""

    center: float = 0.0
    scale: float = 1.0

    def amounts(self, values: Any) -> np.ndarray:
        """Targets, means and ends of intervals, in float64; what is 0 but for the rounding of float32 is 0."""
        amounts = self.center + self.scale * np.asarray(values, float)
        return np.where(np.abs(amounts) < _ROUNDING * abs(self.center), 0.0, amounts)

    def widths(self, values: Any) -> np.ndarray:
        """Differences and standard deviations, in float64: they have no center."""
        return abs(self.scale) * np.asarray(values, float)


def named(predictions: Iterable[Prediction], classes: Sequence[str], level: float, alpha: float) -> Columns:
    """The columns of several batches, with names of classes in place of their numbers; labels stay 0 and 1.

    Args:
        predictions: batch by batch.
        classes: their names, or those of labels; empty in regression.
        level: of the intervals.
        alpha: share of ordinary inputs that may be called out of distribution.
    """
    parts = [prediction.columns(level=level, alpha=alpha) for prediction in predictions]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if classes and columns["prediction"].ndim == 1:
        columns["prediction"] = np.array(classes, object)[columns["prediction"]]
    return columns


def in_unit(columns: Columns, unit: Unit) -> Columns:
    """A regression's columns as people see them."""
    amounts = {name: unit.amounts(columns[name]) for name in ("prediction", "lower", "upper")}
    return {**columns, **amounts, **{name: unit.widths(columns[name]) for name in ("epistemic", "aleatoric")}}


def flat(columns: Mapping[str, Any], classes: Sequence[str]) -> Columns:
    """Matrices column by column: `probability_<class>`, of labels `prediction_<label>` and all others, too.

    Of one target `lower`, of several `lower_0`, `lower_1`, ….
    """
    found: Columns = {}
    for name, values in columns.items():
        if values.ndim == 1 or values.shape[1] == 1:
            found[name] = values.reshape(len(values))
        else:
            labels = classes or range(values.shape[1])
            found |= {f"{name}_{label}": column for label, column in zip(labels, values.T, strict=True)}
    return found
