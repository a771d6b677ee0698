"""From predictions to columns: one row an input, classes by their names, numbers in the unit that people know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dapcal import metrics
from dapcal.predictive import Prediction

Columns = dict[str, np.ndarray]
"""By name: one value an input (N,), or one for every class or target (N, K); see `Prediction.columns`."""

_ROUNDING = 2.0**-22  # of float32, twice
_LARGEST = 700.0  # logarithm of what float64 holds


class Unit(NamedTuple):
    """A regression's targets as people see them: center + scale · the network's target, or the exponential of that.

    Attributes:
        center: of the target, or of its logarithm.
        scale: likewise.
        smearing: None: as it is; else the network learns logarithms, and what medians are multiplied by to be means.
    """

    center: float = 0.0
    scale: float = 1.0
    smearing: float | None = None

    def amounts(self, values: Any) -> np.ndarray:
        """Targets, and ends of intervals, in float64; what is 0 but for the rounding of float32 is 0."""
        amounts = self.center + self.scale * np.asarray(values, float)
        if self.smearing is not None:
            return np.exp(np.clip(amounts, -_LARGEST, _LARGEST))
        return np.where(np.abs(amounts) < _ROUNDING * abs(self.center), 0.0, amounts)

    def means(self, values: Any) -> np.ndarray:
        """Predictions, in float64: the network's mean is that of the logarithm, if it learns one."""
        return self.amounts(values) * (1.0 if self.smearing is None else self.smearing)

    def rmse(self, mean: Tensor, y: Tensor) -> float:
        """Of predictions of the network for its targets, in this unit."""
        return metrics.rmse(torch.from_numpy(self.means(mean)), torch.from_numpy(self.amounts(y)))

    def widths(self, values: Any, at: Any = 1.0) -> np.ndarray:
        """Standard deviations, in float64: they have no center; of logarithms to first order, `at` predictions."""
        widths = abs(self.scale) * np.asarray(values, float)
        return widths if self.smearing is None else widths * np.asarray(at, float)

    def log_slopes(self, values: Any) -> np.ndarray:
        """log |d amount/d target| at targets (N, K), summed over K, (N,): what an NLL per row grows by in this unit."""
        slopes = np.full(np.shape(values), np.log(abs(self.scale)))
        if self.smearing is not None:
            slopes = slopes + self.center + self.scale * np.asarray(values, float)
        return slopes.reshape(len(slopes), -1).sum(1)


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
    mean = unit.means(columns["prediction"])
    ends = {name: unit.amounts(columns[name]) for name in ("lower", "upper")}
    widths = {name: unit.widths(columns[name], mean) for name in ("epistemic", "aleatoric")}
    return {**columns, "prediction": mean, **ends, **widths}


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
