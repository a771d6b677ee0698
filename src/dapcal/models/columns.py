"""From predictions to columns: one row an input, classes by their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dapcal.predictive import Prediction

Columns = dict[str, np.ndarray]
"""By name: one value an input (N,), or one for every class or target (N, K); see `Prediction.columns`."""


def named(predictions: Iterable[Prediction], classes: Sequence[str], level: float, alpha: float) -> Columns:
    """The columns of several batches, with names of classes in place of their numbers.

    Args:
        predictions: batch by batch.
        classes: their names; empty in regression.
        level: of the intervals.
        alpha: share of ordinary inputs that may be called out of distribution.
    """
    parts = [prediction.columns(level=level, alpha=alpha) for prediction in predictions]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if classes:
        columns["prediction"] = np.array(classes, object)[columns["prediction"]]
    return columns


def flat(columns: Mapping[str, Any], classes: Sequence[str]) -> Columns:
    """Matrices column by column: `probability_<class>`; of one target `lower`, of several `lower_0`, `lower_1`, …."""
    found: Columns = {}
    for name, values in columns.items():
        if values.ndim == 1 or values.shape[1] == 1:
            found[name] = values.reshape(len(values))
        else:
            labels = classes or range(values.shape[1])
            found |= {f"{name}_{label}": column for label, column in zip(labels, values.T, strict=True)}
    return found
