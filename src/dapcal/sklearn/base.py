"""What both estimators share: parameters, encoded inputs, and what is said of distance."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d
from torch import Tensor

from dapcal import recipes
from dapcal.amounts import amount
from dapcal.explain import Answer, Neighbours, explainer
from dapcal.likelihoods import ClassLikelihood, Likelihood
from dapcal.predictive import Prediction
from dapcal.recipes import Bounds
from dapcal.sklearn.explained import Neighbour, RowExplanation, explained_row
from dapcal.sklearn.frames import advised, as_frame, as_table, index_of, is_mixed
from dapcal.sklearn.parts import COMMON, plain
from dapcal.types import ALPHA

if TYPE_CHECKING:
    from pandas import DataFrame

    from dapcal.distances import Space
    from dapcal.tables.encoder import Encoder

try:
    from sklearn.utils.validation import validate_data
except ImportError:  # before 1.6 it was a method

    def validate_data(estimator: Any, X: Any, y: Any = "no_validation", **options: Any) -> Any:
        """Checked arrays; sets `n_features_in_` and `feature_names_in_`."""
        return estimator._validate_data(X, y, **options)


NO_BOUNDS = Bounds()
CHUNK = 8192  # rows that predictions take at once


class DistanceAware(BaseEstimator):
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
        return self._read(X, COMMON["ood_p_value"])[0]

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

    def explain(self, X: Any, neighbours: int = 5) -> list[RowExplanation]:
        """Why predictions are what they are, one explanation a row: nearest training rows, far columns, evidence.

        `print(model.explain(X)[0])` says it in words, with targets in the unit of y and rows by the index of X.

        Args:
            X: inputs, (N, P).
            neighbours: how many training rows to name.
        """
        check_is_fitted(self)
        x = self._encoded(X)
        names = self._names()
        find = explainer(self.calibrated_, self.train_x_, names, min(neighbours, len(self.train_x_)))
        found = [find(x[row : row + 1].to(self.train_x_.device), self.alpha) for row in range(len(x))]
        index, values = index_of(X), self._values(x)
        return [
            explained_row(
                one,
                self._in_unit(one.before),
                self._in_unit(one.after),
                row=row if index is None else index[row],
                target=self.target_name_,
                classes=tuple(map(str, getattr(self, "classes_", ()))),
                values=values[row],
                neighbours=self._neighbours(one.nearest),
                alpha=self.alpha,
            )
            for row, one in enumerate(found)
        ]

    def _names(self) -> tuple[str, ...]:
        """Of the column that every input of the networks comes from."""
        if self.encoder_ is not None:
            return self.encoder_.names
        return tuple(getattr(self, "feature_names_in_", [f"column {n + 1}" for n in range(self.n_features_in_)]))

    def _values(self, x: Tensor) -> list[dict[str, str]]:
        """Rows of the networks as people see them."""
        if self.encoder_ is not None:
            return self.encoder_.decode(x)
        plain = x.double().cpu().numpy() * self.scale_ + self.center_
        return [dict(zip(self._names(), map(amount, row), strict=True)) for row in plain.tolist()]

    def _neighbours(self, near: Neighbours) -> tuple[Neighbour, ...]:
        rows = list(near.rows)
        parts = (
            self.train_index_[rows],
            near.distances,
            self.train_y_[rows].tolist(),
            self._values(self.train_x_[rows]),
        )
        return tuple(Neighbour(*each) for each in zip(*parts, strict=True))

    @abstractmethod
    def _in_unit(self, answer: Answer) -> Answer:
        """In the unit of y."""

    def _taken(self, X: Any, y: Any, **options: Any) -> tuple[Any, Any]:
        """Inputs and targets, checked; a DataFrame with texts, categories, dates or missing cells stays one."""
        self.target_name_ = y.name if isinstance(getattr(y, "name", None), str) else "target"
        self.train_index_ = index_of(X)  # of all rows, until those that train are known
        self.encoder_: Encoder | None = None
        if not is_mixed(X):
            with advised():
                return validate_data(self, X, y, dtype=np.float64, **options)
        if y is None:
            raise ValueError("This estimator requires y to be passed, but the target y is None")
        validate_data(self, X, skip_check_array=True)
        y = column_or_1d(y, dtype=np.float64 if options.get("y_numeric") else None)
        check_consistent_length(X, y)
        return X, y

    def _fit(self, X: Any, y: Tensor, likelihood: Likelihood, outputs: int, bounds: Bounds = NO_BOUNDS) -> np.ndarray:
        """Learn, and say which rows train."""
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
            from dapcal.tables.row_space import row_space

            table = as_table(X)
            target = "y" + "_" * max(map(len, table.column_names))  # the name of no column
            train = recipes.training_places(y, recipe, isinstance(likelihood, ClassLikelihood))
            fitted_encoder = fit_encoder(table.append_column(target, [[0] * len(X)]), target, places=train)
            self.encoder_, x = with_codes(fitted_encoder, table, y, recipe.seed, train)
            evidence = (column_space(self.encoder_), row_space(recipe.points, recipe.seed))
            y = y.float() if y.is_floating_point() else y
        fitted = recipes.fit(x, y, likelihood, outputs, recipe, evidence=evidence, bounds=bounds)
        self.calibrated_, self.gaps_, self.train_x_ = fitted.calibrated, fitted.gaps, fitted.train.x
        assert fitted.rows is not None
        rows = fitted.rows.numpy()
        self.train_index_ = rows if self.train_index_ is None else self.train_index_[rows]
        return rows

    def _read(self, X: Any, *parts: Callable[[Prediction], Tensor | list[str]]) -> list[np.ndarray]:
        """Parts of the predictions at X, each (N, ...), numbers in float64."""
        check_is_fitted(self)
        predictions = self.calibrated_.batches(self._encoded(X), CHUNK)
        chunks = [[part(prediction) for part in parts] for prediction in predictions]
        return [np.concatenate([plain(value) for value in values]) for values in zip(*chunks, strict=True)]

    def _encoded(self, X: Any) -> Tensor:
        """Inputs as the networks take them."""
        encoder: Encoder | None = getattr(self, "encoder_", None)  # what an earlier version pickled has none
        if encoder is None:
            with advised():
                return self._standardised(validate_data(self, X, reset=False, dtype=np.float64))
        if not hasattr(X, "iloc"):
            raise ValueError("Expected a DataFrame with the columns that the estimator was fitted on; got an array")
        validate_data(self, X, reset=False, skip_check_array=True)
        return encoder(as_table(X)).x

    def _standardised(self, X: np.ndarray) -> Tensor:
        return torch.from_numpy((X - self.center_) / self.scale_)

    def _why(self, prediction: Prediction) -> list[str]:
        return prediction.reasons(self.alpha)

    def _frame(self, X: Any, columns: dict[str, np.ndarray], reasons: np.ndarray) -> DataFrame:
        verdict = columns["ood_p_value"] <= self.alpha
        return as_frame({**columns, "ood": verdict, "reason": reasons}, X, "predict_frame")
