"""Estimators that are brought, in place of networks: fitted to the rows of a table, their members are the draws.

one forest or bag ──► its trees          one boosting model or tree ──► fitted to several bootstraps of the rows
a list ──► each of it                                             └──► arrays (`dapcal.adapters.tree_arrays`)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np
from torch import Tensor

from dapcal.adapters.tree_arrays import bagged, is_storable, members_of, of_estimators, refusal
from dapcal.data import Labelled
from dapcal.likelihoods import Categorical, ClassLikelihood, Gaussian, Likelihood
from dapcal.moving import moved
from dapcal.posteriors.trees import TreePosterior
from dapcal.recipes.noise import beyond_spread


@dataclass(frozen=True, eq=False)
class Brought:
    """Estimators that are fitted to whatever rows, and then are draws.

    Attributes:
        estimators: one, or several; copies of them are fitted.
        likelihood: of classes, or of numbers.
        outputs: C.
    """

    estimators: tuple[Any, ...]
    likelihood: Likelihood
    outputs: int

    def __post_init__(self) -> None:
        if not self.estimators:
            raise ValueError("Expected an estimator, or a list of two or more, got an empty list; give one at least")
        for one in self.estimators:
            _check(one, self.likelihood)
        if self.own_members == 1:
            raise ValueError(f"Expected two trees or more, got {self.name} of one; one has no spread")

    @property
    def name(self) -> str:
        """Of the class, or of several."""
        return ", ".join(dict.fromkeys(type(one).__name__ for one in self.estimators))

    @property
    def own_members(self) -> int | None:
        """Estimators of a list, or members of a forest; None where one is fitted several times to have some."""
        return len(self.estimators) if len(self.estimators) > 1 else members_of(self.estimators[0])

    def fit(
        self,
        rows: Labelled,
        *,
        members: int,
        seed: int,
        weights: Tensor | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,  # noqa: ARG005
    ) -> TreePosterior:
        """Draws of what is fitted to rows; the same seed gives the same draws.

        Args:
            rows: encoded.
            members: how often an estimator without members of its own is fitted.
            seed: of estimators that name no `random_state`, and of the bootstraps.
            weights: of the rows, (N,).
            progress: told how many of the estimators are fitted.
        """
        from sklearn.base import clone  # costs a second

        of_classes = isinstance(self.likelihood, ClassLikelihood)
        x, y = rows.x.cpu().numpy(), rows.y.cpu().numpy()
        y = y if of_classes else y[:, 0].astype(np.float64)
        own = None if weights is None else weights.cpu().numpy()
        again = self.own_members is None
        several = self.estimators * members if again else self.estimators
        generator = np.random.default_rng(seed)
        fitted = []
        progress(0, len(several))
        for place, estimator in enumerate(several):
            copied = _seeded(clone(estimator), seed + place, place if again else 0)
            chosen = _bootstrap(y, of_classes, generator) if again else np.arange(len(y))
            fitted.append(_fitted(copied, x[chosen], y[chosen], None if own is None else own[chosen]))
            progress(place + 1, len(several))
        posterior = of_estimators(fitted, self.likelihood, self.outputs if of_classes else 0, rows.x.cpu())
        return moved(posterior, rows.x.device)

    def with_noise(self, posterior: TreePosterior, rows: Labelled) -> TreePosterior:
        """As much noise as residuals of rows that were not learnt have beyond the spread; of classes as it was."""
        outputs, likelihood = posterior.outputs(rows.x), posterior.likelihood
        if bool((outputs == outputs[:1]).all()):
            raise ValueError(
                f"All {posterior.count} draws of {self.name} predict the same at all {len(rows.x)} rows that choose: "
                "there is no spread that could grow with distance; leave --estimator out, or let its members differ "
                "(their seeds, max_features, subsample)"
            )
        if not isinstance(likelihood, Gaussian):
            return posterior
        return replace(posterior, likelihood=beyond_spread(likelihood, outputs, rows.y))

    def told(self, posterior: TreePosterior) -> str:
        """What the draws are, in words."""
        if len(self.estimators) > 1:
            return f"draws: {posterior.count} estimators ({self.name})"
        if self.own_members is not None:
            return f"draws: the {posterior.count} members of {self.name}"
        return f"draws: {self.name}, fitted {posterior.count} times, to rows that are drawn with replacement"


def _check(estimator: Any, likelihood: Likelihood) -> None:
    """Refuse what cannot be fitted or stored."""
    name = type(estimator).__name__
    if isinstance(estimator, type):
        raise TypeError(f"Expected an estimator, got the class {estimator.__name__}; make one: {estimator.__name__}()")
    if not is_storable(estimator, likelihood):
        raise _unfit(estimator, likelihood)
    if any(attribute.endswith("_") and not attribute.startswith("_") for attribute in vars(estimator)):
        raise ValueError(
            f"Expected an estimator that is not fitted, got a fitted {name}; return it as it is made: it is fitted "
            "to the encoded training rows"
        )
    if "quantile" in (getattr(estimator, "loss", None), getattr(bagged(estimator), "loss", None)):
        raise ValueError(
            f"Expected an estimator of means, got {name} of a quantile; leave loss='quantile' out: intervals come from "
            "held-out rows"
        )


def _unfit(estimator: Any, likelihood: Likelihood) -> TypeError:
    """Why an estimator is not taken: for another target, or for none."""
    of_classes = isinstance(likelihood, ClassLikelihood)
    if not is_storable(estimator, Gaussian(1.0) if of_classes else Categorical()):
        return refusal(estimator)
    pairs = (("numbers", "regressor", "regression"), ("classes", "classifier", "classification"))
    (holds, wanted, _), (predicts, _, task) = pairs[of_classes], pairs[not of_classes]
    return TypeError(
        f"The target holds {holds}, and {type(estimator).__name__} predicts {predicts}; give a {wanted}, or "
        f"--task {task}"
    )


def _seeded(estimator: Any, seed: int, later: int) -> Any:
    """With the seed of its own plus `later`, or with `seed` if it has none."""
    parameters = estimator.get_params(deep=False)
    if "random_state" not in parameters:
        return estimator
    given = parameters["random_state"]
    if given is not None and not isinstance(given, Integral):  # a generator of its own
        return estimator
    return estimator.set_params(random_state=(seed if given is None else int(given) + later) % 2**32)


def _bootstrap(y: np.ndarray, of_classes: bool, generator: np.random.Generator) -> np.ndarray:
    """Places of rows drawn with replacement, of every class as many as it has."""
    groups = [np.flatnonzero(y == label) for label in np.unique(y)] if of_classes else [np.arange(len(y))]
    return np.concatenate([generator.choice(group, len(group)) for group in groups])


def _fitted(estimator: Any, x: np.ndarray, y: np.ndarray, weights: np.ndarray | None) -> Any:
    try:
        return estimator.fit(x, y) if weights is None else estimator.fit(x, y, sample_weight=weights)
    except Exception as error:  # of what an estimator's options ask for
        told = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{type(estimator).__name__} could not be fitted to the encoded rows ({type(error).__name__}: {told}); "
            "change its options"
        ) from error
