"""Fitted estimators in scikit-learn's manner as draws: the trees of a forest, boosting models of several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dapcal.likelihoods import ClassLikelihood, Gaussian, Likelihood
from dapcal.posteriors.predictions import StackedPredictions

SMOOTHING = 0.01


def from_estimators(
    estimators: Sequence[Any], likelihood: Likelihood, smoothing: float = SMOOTHING
) -> StackedPredictions:
    """A posterior whose draws are estimators: `predict_proba` for classes, `predict` for numbers.

    Distances are measured between inputs, as there is no network to take features from, so scale these first. A file of
    the calibrated posterior holds no estimator: keep yours as you do now, and give the same function to `dapcal.load`
    (`from_estimators(...).function`).

    Args:
        estimators: two or more, fitted to classes 0 to K − 1 or to numbers: `forest.estimators_`, or models of
            different seeds and rows.
        likelihood: `Categorical()`, or `Gaussian(noise)`.
        smoothing: share of a uniform distribution that is mixed into class probabilities, as a tree's may be 0.
    """
    estimators = list(estimators)
    if len(estimators) < 2:
        raise ValueError(f"Expected two estimators or more, got {len(estimators)}; one has no spread")
    of_classes = isinstance(likelihood, ClassLikelihood)
    if not of_classes and not isinstance(likelihood, Gaussian):
        raise TypeError(f"Expected Categorical() or Gaussian(noise) as `likelihood`, got {likelihood!r}")
    if not 0 < smoothing < 1:
        raise ValueError(f"Expected `smoothing` between 0 and 1, got {smoothing}")
    wanted = "predict_proba" if of_classes else "predict"
    odd = next((one for one in estimators if not hasattr(one, wanted)), None)
    if odd is not None:
        raise TypeError(f"Expected estimators with `{wanted}`, got {type(odd).__name__}; fit classifiers for classes")
    classes = max((int(max(one.classes_)) + 1 for one in estimators), default=0) if of_classes else 0
    return StackedPredictions(Stacked(tuple(estimators), classes, smoothing), likelihood)


@dataclass(frozen=True, eq=False)
class Stacked:
    """Outputs (S, N, C) of estimators at inputs (N, P): log probabilities of C classes, or numbers (C = 1)."""

    estimators: tuple[Any, ...]
    classes: int  # 0 for numbers
    smoothing: float

    def __call__(self, x: Tensor) -> Tensor:
        """Of all estimators."""
        rows = x.detach().cpu().numpy()
        return torch.stack([torch.from_numpy(self._of(one, rows)) for one in self.estimators]).to(x)

    def _of(self, estimator: Any, rows: np.ndarray) -> np.ndarray:
        if not self.classes:
            return np.asarray(estimator.predict(rows), np.float64).reshape(len(rows), -1)
        p = np.zeros((len(rows), self.classes))  # an estimator may not have seen all classes
        p[:, np.asarray(estimator.classes_).astype(int)] = estimator.predict_proba(rows)
        return np.log((1 - self.smoothing) * p + self.smoothing / self.classes)
