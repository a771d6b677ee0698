"""A classifier whose probabilities tend to 1/K away from the training data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets

from dapcal.explain import Answer
from dapcal.likelihoods import Categorical
from dapcal.sklearn.base import DistanceAware
from dapcal.sklearn.parts import COMMON

if TYPE_CHECKING:
    from pandas import DataFrame


class DistanceAwareClassifier(ClassifierMixin, DistanceAware):
    """Classifier whose probabilities tend to 1/K away from the training data.

    Inputs are standardised inside. A share of the rows is held out of training to calibrate on;
    with `refit` an ensemble is then trained once more, on all rows.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True, as_frame=True)
    >>> model = DistanceAwareClassifier(members=2, epochs=30, random_state=0).fit(X, y)
    >>> bool(model.score(X, y) > 0.9)
    True
    >>> model.is_ood(100 * X[:1])
    array([ True])

    Args:
        posterior, hidden, epochs, learning_rate, batch_size, prior_scale: as in `dapcal.recipes.Recipe`.
        members, draws, validation, guard, refit, fast, device: as there.
        alpha: level of `is_ood`: the share of in-distribution inputs that it may flag.
        random_state: an integer gives the same results in every run.

    Attributes:
        classes_: the labels, in the order of the probabilities' columns.
        calibrated_: the `dapcal.Calibrated` behind it, of inputs standardised by `center_` and `scale_`.
        gaps_: what gap cross-validation chose, and its gains region by region (`dapcal.calibration.gap_choice`); None
            with `fast`, and where there are too few rows.
        n_features_in_, feature_names_in_: number of columns, and their names where X had names.
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Hold out some rows, train on the others, and calibrate."""
        X, y = self._taken(X, y)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        self.train_y_ = y[self._fit(X, torch.from_numpy(labels), Categorical(), len(self.classes_))]
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The most likely class, (N,)."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities of `classes_`, (N, K)."""
        return self._read(X, lambda prediction: prediction.probs)[0]

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Their logarithms, (N, K)."""
        return np.log(self.predict_proba(X))

    def predict_frame(self, X: Any) -> DataFrame:
        """All that is known of the predictions, with the index of X.

        `epistemic` and `aleatoric` are the parts of the variance 1 − Σ p²; `distance` is 0 where an input is as near to
        the training data as most held-out rows were; `reason` says why an input is out of distribution, if it is.
        """
        shown = self._read(X, lambda prediction: prediction.probs, *COMMON.values(), self._why)
        probabilities, *common, reasons = shown
        columns = {"prediction": self.classes_[probabilities.argmax(1)]}
        columns |= {f"probability_{label}": probabilities[:, k] for k, label in enumerate(self.classes_)}
        return self._frame(X, columns | dict(zip(COMMON, common, strict=True)), reasons)

    def _in_unit(self, answer: Answer) -> Answer:
        return answer
