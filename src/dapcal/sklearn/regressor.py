"""A regressor whose predictive standard deviation grows away from the training data."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from sklearn import get_config
from sklearn.base import RegressorMixin

from dapcal.explain import Answer
from dapcal.likelihoods import Gaussian
from dapcal.recipes import Limits, in_network_unit, limits_of
from dapcal.sklearn.base import DistanceAware
from dapcal.sklearn.explained import in_unit
from dapcal.sklearn.frames import as_frame
from dapcal.sklearn.parts import COMMON, ends_of, mean_of, std_of
from dapcal.types import ALPHA, LEVEL

if TYPE_CHECKING:
    from pandas import DataFrame


_CONTAINERS = ("default", "pandas")


class DistanceAwareRegressor(RegressorMixin, DistanceAware):
    """Regressor whose predictive standard deviation grows away from the training data.

    Inputs and targets are standardised inside. A share of the rows is held out of training to calibrate on;
    with `refit` an ensemble is then trained once more, on all rows.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True, as_frame=True)
    >>> model = DistanceAwareRegressor(members=2, epochs=30, random_state=0).fit(X, y)
    >>> mean, std = model.predict(X, return_std=True)
    >>> mean, lower, upper = model.predict(X, interval=0.9)
    >>> bool(np.mean((lower < y) & (y < upper)) > 0.8)
    True

    Args:
        posterior, hidden, epochs, learning_rate, batch_size, prior_scale: as in `dapcal.recipes.Recipe`.
        members, draws, validation, guard, refit, fast, device: as there.
        alpha: level of `is_ood`: the share of in-distribution inputs that it may flag.
        random_state: an integer gives the same results in every run.
        bounds: (least, greatest) value that the target can have, None for no limit: predictions and intervals stay
            within; by default 0 where no training target is below it, and `calibrated_.notes` say so.

    Attributes:
        calibrated_: the `dapcal.Calibrated` behind it, of inputs standardised by `center_` and `scale_` and targets by
            `unit_`.
        unit_: mean and standard deviation of the targets.
        bounds_: least and greatest value of the target, as given or found; infinite where there is no limit.
        gaps_: what gap cross-validation chose, and its gains region by region (`dapcal.calibration.gap_choice`); None
            with `fast`, and where there are too few rows.
        n_features_in_, feature_names_in_: number of columns, and their names where X had names.
    """

    bounds: Limits | None = None  # also of what an earlier version pickled
    bounds_: tuple[float, float] = (-inf, inf)

    def __init__(
        self,
        posterior: str = "ensemble",
        hidden: tuple[int, ...] | None = None,
        epochs: int | None = None,
        learning_rate: float | None = None,
        batch_size: int | None = None,
        prior_scale: float = 1.0,
        members: int | None = None,
        draws: int = 50,
        validation: float = 0.2,
        guard: float = 0.005,
        refit: bool = True,
        fast: bool = False,
        alpha: float = ALPHA,
        device: str = "cpu",
        random_state: int | np.random.RandomState | None = None,
        bounds: Limits | None = None,
    ) -> None:
        super().__init__(
            posterior=posterior,
            hidden=hidden,
            epochs=epochs,
            learning_rate=learning_rate,
            batch_size=batch_size,
            prior_scale=prior_scale,
            members=members,
            draws=draws,
            validation=validation,
            guard=guard,
            refit=refit,
            fast=fast,
            alpha=alpha,
            device=device,
            random_state=random_state,
        )
        self.bounds = bounds

    def fit(self, X: Any, y: Any) -> Self:
        """Hold out some rows, train on the others, and calibrate."""
        X, y = self._taken(X, y, y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        self.unit_ = (center, scale) = (float(y.mean()), float(y.std()) or 1.0)
        limits = limits_of(float(y.min()), float(y.max()), self._limits(), "The target", "`bounds`")
        self.bounds_ = (-inf if limits[0] is None else limits[0], inf if limits[1] is None else limits[1])
        bounds = in_network_unit(limits, lambda amount: (amount - center) / scale)
        self.train_y_ = y[self._fit(X, torch.from_numpy((y - center) / scale), Gaussian(), 1, bounds)]
        if self.bounds is None and limits[0] is not None:
            told = "no target is below 0, so no prediction or interval goes below it; bounds=(None, None) allows it"
            self.calibrated_ = replace(self.calibrated_, notes=(*self.calibrated_.notes, told))
        return self

    def predict(
        self, X: Any, return_std: bool = False, interval: float | None = None
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        """The mean (N,), or (mean, standard deviation), or (mean, lower, upper).

        Args:
            X: inputs, (N, P).
            return_std: also the predictive standard deviation.
            interval: also the ends of the central interval that holds a target with this probability.
        """
        if interval is None:
            mean, std = self._read(X, mean_of, std_of)
            return (self._shown(mean), self.unit_[1] * std) if return_std else self._shown(mean)
        if return_std:
            raise ValueError("Expected `return_std` or `interval`, got both; predict_frame(X) gives both")
        return tuple(map(self._shown, self._read(X, mean_of, *ends_of(interval))))

    def predict_interval(self, X: Any, level: float = LEVEL) -> np.ndarray | DataFrame:
        """Lower and upper end of the interval that holds a target with probability `level`, (N, 2).

        With `set_output(transform="pandas")`, or scikit-learn's configuration of that, a DataFrame with the index of X.
        """
        lower, upper = (self._shown(end) for end in self._read(X, *ends_of(level)))
        if self._container() == "pandas":
            return as_frame({"lower": lower, "upper": upper}, X, "predict_interval as pandas")
        return np.stack([lower, upper], 1)

    def set_output(self, *, transform: str | None = None) -> Self:
        """What `predict_interval` returns: an array ("default"), or a DataFrame ("pandas"); None leaves it as it is.

        Predictions stay arrays, as in all of scikit-learn, and `predict_frame` is a DataFrame in any case.
        """
        if transform not in (None, *_CONTAINERS):
            raise ValueError(f"Expected `transform` as {' or '.join(_CONTAINERS)}, got {transform!r}")
        if transform is not None:
            self._sklearn_output_config = {"transform": transform}  # a name that `sklearn.base.clone` copies
        return self

    def _container(self) -> str:
        own: dict[str, str] = getattr(self, "_sklearn_output_config", {})
        return own.get("transform", get_config()["transform_output"])

    def predict_frame(self, X: Any, interval: float = LEVEL) -> DataFrame:
        """All that is known of the predictions, with the index of X.

        `epistemic` and `aleatoric` are standard deviations whose squares add up to std²; `distance` is 0 where an input
        is as near to the training data as most held-out rows were; `reason` says why it is out of distribution, if so.
        """
        shown = self._read(X, mean_of, *ends_of(interval), std_of, *COMMON.values(), self._why)
        mean, lower, upper, std, *common, reasons = shown
        columns = {
            "prediction": self._shown(mean),
            "std": self.unit_[1] * std,
            "lower": self._shown(lower),
            "upper": self._shown(upper),
            **dict(zip(COMMON, common, strict=True)),
        }
        for part in ("epistemic", "aleatoric"):
            columns[part] = self.unit_[1] * np.sqrt(columns[part])
        return self._frame(X, columns, reasons)

    def _shown(self, target: np.ndarray) -> np.ndarray:
        """In the target's unit, and within its bounds."""
        return np.clip(self.unit_[0] + self.unit_[1] * target, *self.bounds_)

    def _in_unit(self, answer: Answer) -> Answer:
        return in_unit(answer, lambda values: tuple(self._shown(np.array(values)).tolist()), self.unit_[1])

    def _limits(self) -> Limits | None:
        if self.bounds is None:
            return None
        try:
            lower, upper = (None if end is None else float(end) for end in self.bounds)
        except (TypeError, ValueError):
            raise ValueError(
                f"Expected `bounds` as (least, greatest), None for no limit, e.g. (0, None), got {self.bounds!r}"
            ) from None
        return lower, upper
