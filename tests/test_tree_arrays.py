"""Forests and boosting models as plain arrays, against what scikit-learn's own objects predict."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator, clone, is_classifier
from sklearn.ensemble import (
    AdaBoostClassifier,
    BaggingClassifier,
    BaggingRegressor,
    ExtraTreesClassifier,
    ExtraTreesRegressor,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from dapcal.adapters.tree_arrays import is_storable, of_estimators
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.posteriors.trees import TreePosterior

HIST = {"max_iter": 12, "min_samples_leaf": 5}
ESTIMATORS: dict[str, BaseEstimator] = {
    "random forest": RandomForestClassifier(6, random_state=0),
    "few leaves": RandomForestClassifier(6, max_leaf_nodes=9, class_weight="balanced", random_state=0),
    "extra trees": ExtraTreesClassifier(6, random_state=0),
    "boosting": GradientBoostingClassifier(n_estimators=6, subsample=0.7, random_state=0),
    "boosting by histograms": HistGradientBoostingClassifier(**HIST),
    "bagging": BaggingClassifier(DecisionTreeClassifier(), 6, max_features=0.5, max_samples=0.3, random_state=0),
    "bagged boosting": BaggingClassifier(GradientBoostingClassifier(n_estimators=3), 3, random_state=0),
    "tree": DecisionTreeClassifier(max_depth=4),
    "forest of numbers": RandomForestRegressor(6, random_state=0),
    "forest of medians": RandomForestRegressor(6, criterion="absolute_error", max_depth=4, random_state=0),
    "extra trees of numbers": ExtraTreesRegressor(6, random_state=0),
    "boosting of numbers": GradientBoostingRegressor(n_estimators=6, loss="huber", random_state=0),
    "from zero": GradientBoostingRegressor(n_estimators=6, init="zero", random_state=0),
    "histograms of numbers": HistGradientBoostingRegressor(**HIST),
    "bagging of numbers": BaggingRegressor(DecisionTreeRegressor(), 6, max_features=2, random_state=0),
    "bagged forests": BaggingRegressor(RandomForestRegressor(2), 3, random_state=0),
    "tree of numbers": DecisionTreeRegressor(max_depth=4),
}


def rows(n: int = 300, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))


def targets(x: torch.Tensor, classes: int) -> np.ndarray:
    score = x[:, 0] + (x[:, 1] > 0.3) * x[:, 2] + 0.3 * torch.randn(len(x), generator=torch.Generator().manual_seed(7))
    if not classes:
        return score.numpy()
    edges = torch.linspace(-1, 1, classes + 1)[1:-1]
    return torch.bucketize(score, edges).numpy()


def stored(estimator: Any, x: torch.Tensor, classes: int) -> TreePosterior:
    return of_estimators([estimator], Categorical() if classes else Gaussian(1.0), classes, x)


def predicted(posterior: TreePosterior, x: torch.Tensor) -> np.ndarray:
    sums = posterior.forest(x) if posterior.link == "numbers" else posterior.probabilities(x)
    return sums.mean(0).numpy()


def expected(estimator: Any, x: torch.Tensor) -> np.ndarray:
    return estimator.predict_proba(x.numpy()) if is_classifier(estimator) else estimator.predict(x.numpy())[:, None]


@pytest.mark.parametrize(
    ("name", "classes"), [(n, k) for n, one in ESTIMATORS.items() for k in ([2, 3] if is_classifier(one) else [0])]
)
def test_arrays_predict_as_the_estimator_does(name, classes):
    x = rows()
    estimator = clone(ESTIMATORS[name]).fit(x.numpy(), targets(x, classes))
    posterior = stored(estimator, x, classes)
    new = 2 * rows(400, 1)
    np.testing.assert_allclose(predicted(posterior, new), expected(estimator, new), atol=1e-6, rtol=1e-6)
    batched = torch.cat([posterior.outputs(part) for part in new.split(7)], 1)
    assert torch.equal(batched, posterior.outputs(new))


@pytest.mark.parametrize("name", ["forest of numbers", "boosting of numbers", "histograms of numbers"])
def test_rows_in_double_precision_go_where_the_estimator_sends_them(name):
    x = rows().double()
    estimator = clone(ESTIMATORS[name]).fit(x.numpy(), targets(x, 0))
    posterior = stored(estimator, x, 0)
    near = posterior.forest.threshold.double()[posterior.forest.child > 0]
    new = torch.stack([near, near + 1e-12, near - 1e-12, near.flip(0)], 1)  # rounding decides
    np.testing.assert_allclose(predicted(posterior, new), expected(estimator, new), atol=1e-6)
    assert posterior.outputs(new).dtype == torch.float64


def test_a_loss_with_another_link_is_that_of_the_estimator():
    x = rows()
    model = GradientBoostingClassifier(loss="exponential", n_estimators=5).fit(x.numpy(), targets(x, 2))
    np.testing.assert_allclose(predicted(stored(model, x, 2), x), expected(model, x), atol=1e-6)
    counts = HistGradientBoostingRegressor(loss="poisson", **HIST).fit(x.numpy(), targets(x, 3))
    with pytest.raises(TypeError, match="from_estimators"):
        stored(counts, x, 0)


TAKES_MISSING = [n for n in ESTIMATORS if "histograms" in n or "forest" in n.split() or n == "tree" or "extra" in n]
TAKES_MISSING.remove("forest of medians")  # in newer versions of scikit-learn alone


@pytest.mark.parametrize("name", TAKES_MISSING)
def test_missing_cells_go_where_the_estimator_sends_them(name):
    estimator = clone(ESTIMATORS[name])
    classes = 3 if is_classifier(estimator) else 0
    x, new = rows(), rows(200, 1)
    y = targets(x, classes)
    for part, seed in ((x, 2), (new, 3)):
        part[torch.rand(part.shape, generator=torch.Generator().manual_seed(seed)) < 0.2] = torch.nan
    x[:, 3] = torch.where(torch.from_numpy(y) > 0, torch.nan, 0.0)  # a split of what is missing from what is not
    estimator.fit(x.numpy(), y)
    np.testing.assert_allclose(predicted(stored(estimator, x, classes), new), expected(estimator, new), atol=1e-6)


@pytest.mark.parametrize("name", ["random forest", "boosting by histograms", "boosting", "bagging", "bagged boosting"])
def test_a_class_without_rows_is_never_predicted(name):
    x = rows()
    y = 2 * targets(x, 2)  # 0 and 2
    estimator = clone(ESTIMATORS[name]).fit(x.numpy(), y)
    posterior = stored(estimator, x, 4)
    found = predicted(posterior, x)
    np.testing.assert_allclose(found[:, [0, 2]], expected(estimator, x), atol=1e-6)
    assert (found[:, [1, 3]] == 0).all()
    assert posterior.outputs(x).isfinite().all()


def test_of_one_its_members_are_draws_and_of_several_each_is_one():
    x = rows()
    forests = [RandomForestClassifier(5, random_state=seed).fit(x.numpy(), targets(x, 3)) for seed in range(3)]
    assert stored(forests[0], x, 3).count == 5
    several = of_estimators(forests, Categorical(), 3, x)
    assert several.count == 3
    for place, forest in enumerate(forests):
        np.testing.assert_allclose(several.probabilities(x)[place].numpy(), forest.predict_proba(x.numpy()), atol=1e-6)
    boosted = HistGradientBoostingClassifier(**HIST).fit(x.numpy(), targets(x, 3))
    with pytest.raises(ValueError, match="one kind"):
        of_estimators([forests[0], boosted], Categorical(), 3, x)


@pytest.mark.parametrize(
    "estimator",
    [LogisticRegression(), AdaBoostClassifier(n_estimators=3), BaggingClassifier(LogisticRegression(), 2)],
)
def test_what_is_not_trees_names_the_way_in_python(estimator):
    x = rows()
    estimator.fit(x.numpy(), targets(x, 3))
    with pytest.raises(TypeError, match=r"dapcal\.adapters\.estimators\.from_estimators"):
        stored(estimator, x, 3)


def test_an_estimator_that_predicts_otherwise_than_its_trees_is_refused():
    class Shifted(RandomForestRegressor):
        def predict(self, X):
            return super().predict(X) + 1

    x = rows()
    with pytest.raises(TypeError, match="Shifted cannot be stored"):
        stored(Shifted(3).fit(x.numpy(), targets(x, 0)), x, 0)
    started = GradientBoostingRegressor(init=Ridge(), n_estimators=3).fit(x.numpy(), targets(x, 0))
    with pytest.raises(TypeError, match="cannot be stored"):
        stored(started, x, 0)


def test_classifiers_are_for_classes():
    assert is_storable(RandomForestClassifier(), Categorical())
    assert not is_storable(RandomForestClassifier(), Gaussian(1.0))
    assert not is_storable(LogisticRegression(), Categorical())
    assert is_storable(BaggingClassifier(), Categorical())
    assert not is_storable(BaggingClassifier(LogisticRegression()), Categorical())
