"""Estimators for scikit-learn: a classifier and a regressor that know how far an input lies from their data.

There is no `decision_function`: scikit-learn keeps it for the scores of classes in classifiers and refuses it in
regressors. Whether an input is out of distribution is said by `ood_decision_function`, `ood_p_value`, `is_ood` and
`score_samples`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from dapcal import recipes
from dapcal.explain import Explanation, explainer
from dapcal.likelihoods import Categorical, Gaussian, Likelihood
from dapcal.predictive import Prediction
from dapcal.types import ALPHA, LEVEL

if TYPE_CHECKING:
    from pandas import DataFrame

    from dapcal.distances import Space
    from dapcal.tables.encoder import Encoder

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d
except ImportError as error:
    raise ImportError("dapcal.sklearn needs scikit-learn; install it with: pip install 'dapcal[sklearn]'") from error
try:
    from sklearn.utils.validation import validate_data
except ImportError:  # before 1.6 it was a method

    def validate_data(estimator: Any, X: Any, y: Any = "no_validation", **options: Any) -> Any:
        """Checked arrays; sets `n_features_in_` and `feature_names_in_`."""
        return estimator._validate_data(X, y, **options)


__all__ = ["DistanceAwareClassifier", "DistanceAwareRegressor"]

CHUNK = 8192  # rows that predictions take at once


class _DistanceAware(BaseEstimator):
    """What both estimators share: parameters, standardised inputs, and what is said of distance."""

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
    ) -> None:
        self.posterior = posterior
        self.hidden = hidden
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.prior_scale = prior_scale
        self.members = members
        self.draws = draws
        self.validation = validation
        self.guard = guard
        self.refit = refit
        self.fast = fast
        self.alpha = alpha
        self.device = device
        self.random_state = random_state

    def score_samples(self, X: Any) -> np.ndarray:
        """How normal inputs are, (N,): higher = more like the training data, as in scikit-learn's outlier detectors."""
        return -self._read(X, lambda prediction: prediction.ood_score)[0]

    def ood_p_value(self, X: Any) -> np.ndarray:
        """Conformal p-value of "this input is in distribution", (N,)."""
        return self._read(X, _COMMON["ood_p_value"])[0]

    def is_ood(self, X: Any, alpha: float | None = None) -> np.ndarray:
        """Whether inputs are out of distribution, (N,); of those that are not, a share of `alpha` is flagged at most.

        With n rows held out no p-value is under 1/(n/2 + 1): for α = 0.05 a table needs 120 rows.

        Args:
            X: inputs, (N, P).
            alpha: by default that of the estimator.
        """
        return self.ood_p_value(X) <= (self.alpha if alpha is None else alpha)

    def ood_decision_function(self, X: Any) -> np.ndarray:
        """p-value minus `alpha`, (N,): negative = out of distribution, as scikit-learn's outlier detectors count."""
        return self.ood_p_value(X) - self.alpha

    def explain(self, X: Any, neighbours: int = 5) -> list[Explanation]:
        """Why predictions are what they are, one explanation a row: nearest training rows, far columns, evidence.

        Args:
            X: inputs, (N, P).
            neighbours: how many training rows to name, by their place in `train_x_`.
        """
        check_is_fitted(self)
        x = self._encoded(X)
        names = tuple(getattr(self, "feature_names_in_", ())) if self.encoder_ is None else self.encoder_.names
        explained = explainer(self.calibrated_, self.train_x_, names, min(neighbours, len(self.train_x_)))
        return [explained(x[row : row + 1].to(self.train_x_.device)) for row in range(len(x))]

    def _taken(self, X: Any, y: Any, **options: Any) -> tuple[Any, Any]:
        """Inputs and targets, checked; a DataFrame with texts, categories, dates or missing cells stays one."""
        self.encoder_: Encoder | None = None
        if not _is_mixed(X):
            return validate_data(self, X, y, dtype=np.float64, **options)
        if y is None:
            raise ValueError("This estimator requires y to be passed, but the target y is None")
        validate_data(self, X, skip_check_array=True)
        y = column_or_1d(y, dtype=np.float64 if options.get("y_numeric") else None)
        check_consistent_length(X, y)
        return X, y

    def _fit(self, X: Any, y: Tensor, likelihood: Likelihood, outputs: int) -> Self:
        left_open = {
            "hidden": None if self.hidden is None else tuple(self.hidden),
            "learning_rate": self.learning_rate,
            "members": self.members,
        }
        recipe = recipes.Recipe(
            posterior=self.posterior,
            epochs=self.epochs,
            batch_size=self.batch_size,
            prior_scale=self.prior_scale,
            draws=self.draws,
            validation=self.validation,
            guard=self.guard,
            refit=self.refit,
            fast=self.fast,
            seed=int(check_random_state(self.random_state).randint(2**31 - 1)),
            device=self.device,
            **left_open,  # type: ignore[arg-type]
        )
        evidence: tuple[Space, ...] = ()
        if isinstance(X, np.ndarray):
            self.center_, self.scale_ = X.mean(0), X.std(0)
            constant = self.scale_ <= 10 * np.finfo(X.dtype).eps * np.abs(self.center_)
            self.scale_[constant] = 1.0
            x = self._standardised(X)
        else:
            from dapcal.tables.coding import with_codes
            from dapcal.tables.column_space import column_space
            from dapcal.tables.encoder import fit_encoder

            table = _table(X)
            target = "y" + "_" * max(map(len, table.column_names))  # the name of no column
            fitted_encoder = fit_encoder(table.append_column(target, [[0] * len(X)]), target)
            self.encoder_, x = with_codes(fitted_encoder, table, y, recipe.seed)
            evidence = (column_space(self.encoder_),)
            y = y.float() if y.is_floating_point() else y
        fitted = recipes.fit(x, y, likelihood, outputs, recipe, evidence=evidence)
        self.calibrated_, self.gaps_, self.train_x_ = fitted.calibrated, fitted.gaps, fitted.train.x
        return self

    def _read(self, X: Any, *parts: Callable[[Prediction], Tensor | list[str]]) -> list[np.ndarray]:
        """Parts of the predictions at X, each (N, ...), numbers in float64."""
        check_is_fitted(self)
        predictions = self.calibrated_.batches(self._encoded(X), CHUNK)
        chunks = [[part(prediction) for part in parts] for prediction in predictions]
        return [np.concatenate([_plain(value) for value in values]) for values in zip(*chunks, strict=True)]

    def _encoded(self, X: Any) -> Tensor:
        """Inputs as the networks take them."""
        encoder: Encoder | None = getattr(self, "encoder_", None)  # what an earlier version pickled has none
        if encoder is None:
            return self._standardised(validate_data(self, X, reset=False, dtype=np.float64))
        if not hasattr(X, "iloc"):
            raise ValueError("Expected a DataFrame with the columns that the estimator was fitted on; got an array")
        validate_data(self, X, reset=False, skip_check_array=True)
        return encoder(_table(X)).x

    def _standardised(self, X: np.ndarray) -> Tensor:
        return torch.from_numpy((X - self.center_) / self.scale_)

    def _why(self, prediction: Prediction) -> list[str]:
        return prediction.reasons(self.alpha)

    def _frame(self, X: Any, columns: dict[str, np.ndarray], reasons: np.ndarray) -> DataFrame:
        try:
            import pandas
        except ImportError as error:
            raise ImportError("predict_frame needs pandas; install it with: pip install pandas") from error
        verdict = columns["ood_p_value"] <= self.alpha
        return pandas.DataFrame({**columns, "ood": verdict, "reason": reasons}, index=getattr(X, "index", None))


class DistanceAwareClassifier(ClassifierMixin, _DistanceAware):
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
        return self._fit(X, torch.from_numpy(labels), Categorical(), len(self.classes_))

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
        shown = self._read(X, lambda prediction: prediction.probs, *_COMMON.values(), self._why)
        probabilities, *common, reasons = shown
        columns = {"prediction": self.classes_[probabilities.argmax(1)]}
        columns |= {f"probability_{label}": probabilities[:, k] for k, label in enumerate(self.classes_)}
        return self._frame(X, columns | dict(zip(_COMMON, common, strict=True)), reasons)


class DistanceAwareRegressor(RegressorMixin, _DistanceAware):
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

    Attributes:
        calibrated_: the `dapcal.Calibrated` behind it, of inputs standardised by `center_` and `scale_` and targets by
            `unit_`.
        unit_: mean and standard deviation of the targets.
        gaps_: what gap cross-validation chose, and its gains region by region (`dapcal.calibration.gap_choice`); None
            with `fast`, and where there are too few rows.
        n_features_in_, feature_names_in_: number of columns, and their names where X had names.
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Hold out some rows, train on the others, and calibrate."""
        X, y = self._taken(X, y, y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        self.unit_ = (float(y.mean()), float(y.std()) or 1.0)
        return self._fit(X, torch.from_numpy((y - self.unit_[0]) / self.unit_[1]), Gaussian(), 1)

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
            mean, std = self._read(X, _mean, _std)
            return (self._shown(mean), self.unit_[1] * std) if return_std else self._shown(mean)
        if return_std:
            raise ValueError("Expected `return_std` or `interval`, got both; predict_frame(X) gives both")
        return tuple(map(self._shown, self._read(X, _mean, *_ends(interval))))

    def predict_interval(self, X: Any, level: float = LEVEL) -> np.ndarray:
        """Lower and upper end of the interval that holds a target with probability `level`, (N, 2)."""
        return np.stack([self._shown(end) for end in self._read(X, *_ends(level))], 1)

    def predict_frame(self, X: Any, interval: float = LEVEL) -> DataFrame:
        """All that is known of the predictions, with the index of X.

        `epistemic` and `aleatoric` are standard deviations whose squares add up to std²; `distance` is 0 where an input
        is as near to the training data as most held-out rows were; `reason` says why it is out of distribution, if so.
        """
        shown = self._read(X, _mean, *_ends(interval), _std, *_COMMON.values(), self._why)
        mean, lower, upper, std, *common, reasons = shown
        columns = {
            "prediction": self._shown(mean),
            "std": self.unit_[1] * std,
            "lower": self._shown(lower),
            "upper": self._shown(upper),
            **dict(zip(_COMMON, common, strict=True)),
        }
        for part in ("epistemic", "aleatoric"):
            columns[part] = self.unit_[1] * np.sqrt(columns[part])
        return self._frame(X, columns, reasons)

    def _shown(self, target: np.ndarray) -> np.ndarray:
        return self.unit_[0] + self.unit_[1] * target


def _is_mixed(X: Any) -> bool:
    """Whether X is a DataFrame with columns that are not plain numbers, or with missing cells."""
    if not (hasattr(X, "iloc") and hasattr(X, "dtypes") and hasattr(X, "columns")):
        return False
    plain = all(isinstance(kind, np.dtype) and kind.kind in "biuf" for kind in X.dtypes)
    return len(X) > 0 and X.shape[1] > 0 and (not plain or bool(X.isna().to_numpy().any()))


def _table(X: Any) -> Any:
    """A DataFrame as a table of Arrow's, without its index."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise ImportError(
            "DataFrames with texts need pyarrow; install it with: pip install 'dapcal[tables]'"
        ) from error
    return pa.Table.from_pandas(X, preserve_index=False)


_COMMON: dict[str, Callable[[Prediction], Tensor]] = {
    "epistemic": lambda prediction: prediction.epistemic.flatten(),  # one target: (N, 1)
    "aleatoric": lambda prediction: prediction.aleatoric.flatten(),
    "distance": lambda prediction: prediction.distance,
    "ood_p_value": lambda prediction: prediction.ood_p_value,
}


def _plain(value: Tensor | list[str]) -> np.ndarray:
    return value.double().numpy() if isinstance(value, Tensor) else np.array(value, object)


def _mean(prediction: Prediction) -> Tensor:
    return prediction.mean[:, 0]


def _std(prediction: Prediction) -> Tensor:
    return prediction.variance[:, 0].sqrt()


def _ends(level: float) -> tuple[Callable[[Prediction], Tensor], Callable[[Prediction], Tensor]]:
    return lambda p: p.interval(level).lower[:, 0], lambda p: p.interval(level).upper[:, 0]
