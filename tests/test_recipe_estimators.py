"""Estimators in place of networks: what is fitted to which rows, and tables that are awkward for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from sklearn.ensemble import (
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.tree import DecisionTreeRegressor

import dapcal
from dapcal.data import Labelled
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.models import large_tables
from dapcal.posteriors.trees import TreePosterior
from dapcal.recipes import ESTIMATOR, Fitted, Recipe, fit
from dapcal.recipes.estimators import Brought
from dapcal.tables import Sample


def rows(n: int = 200, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))


def numbers(x: torch.Tensor) -> torch.Tensor:
    return (x[:, :1] + 0.3 * torch.randn(len(x), 1, generator=torch.Generator().manual_seed(1))).float()


def fitted(estimators: list[Any], x: torch.Tensor, y: torch.Tensor, **options) -> Fitted:
    of_classes = not y.is_floating_point()
    likelihood, outputs = (Categorical(), int(y.max()) + 1) if of_classes else (Gaussian(1.0), 1)
    return fit(x, y, likelihood, outputs, Recipe(posterior=ESTIMATOR, **options), estimators=estimators)


def test_one_boosting_model_is_fitted_to_bootstraps_of_which_each_is_another():
    x = rows()
    brought = Brought((HistGradientBoostingRegressor(max_iter=10),), Gaussian(1.0), 1)
    posterior = brought.fit(Labelled(x, numbers(x)), members=4, seed=0)
    outputs = posterior.outputs(x)[..., 0]
    assert outputs.shape == (4, 200)
    assert (torch.pdist(outputs) > 0.1).all()
    again = brought.fit(Labelled(x, numbers(x)), members=4, seed=0).outputs(x)[..., 0]
    assert torch.equal(outputs, again)
    assert brought.told(posterior) == (
        "draws: HistGradientBoostingRegressor, fitted 4 times, to rows that are drawn with replacement"
    )


def test_bootstraps_keep_rare_classes():
    x = rows()
    y = torch.zeros(200, dtype=torch.long)
    y[:2], y[2:90] = 2, 1
    brought = Brought((GradientBoostingClassifier(n_estimators=2),), Categorical(), 3)
    assert (brought.fit(Labelled(x, y), members=6, seed=0).probabilities(x) > 0).all()


def test_weights_are_heeded():
    x, y = torch.zeros(200, 1), torch.tensor([[0.0], [1.0]]).repeat(100, 1)
    weights = torch.tensor([1.0, 3.0]).repeat(100)
    for one in (RandomForestRegressor(20, random_state=0), DecisionTreeRegressor()):
        posterior = Brought((one,), Gaussian(1.0), 1).fit(Labelled(x, y), members=20, seed=0, weights=weights)
        assert float(posterior.outputs(x).mean()) == pytest.approx(0.75, abs=0.03)


def test_noise_is_what_residuals_have_beyond_the_spread():
    x = rows(400)
    calibrated = fitted([RandomForestRegressor(20, min_samples_leaf=10, random_state=0)], x, numbers(x), fast=True)
    deviation = calibrated.calibrated(rows(500, 5)).variance.sqrt()
    assert float(deviation.mean()) == pytest.approx(0.3, rel=0.4)


def test_a_target_with_hardly_any_noise_has_a_posterior():
    """Trees predict nearly all held-out rows without any error."""
    x = rows().round()
    y = (x[:, :1] > 0).float()
    y[0] += 1
    found = fitted([RandomForestRegressor(10, random_state=0)], x, y, fast=True)
    assert found.calibrated(x).variance.isfinite().all()


def test_regions_that_leave_one_class_are_not_read():
    x = rows(400)
    y = (x[:, 0] > 1).long()
    found = fitted([RandomForestClassifier(10, random_state=0)], x, y)
    assert found.gaps is not None
    assert isinstance(found.calibrated.posterior, TreePosterior)


def test_members_trained_again_have_learnt_held_out_rows_of_classes():
    x = rows()
    y = (x[:, 0] + x[:, 1] > 0).long()
    found = fitted([RandomForestClassifier(25, random_state=0)], x, y, fast=True)
    calibrated = found.calibrated
    own = RandomForestClassifier(25, random_state=0).fit(x.numpy(), y.numpy())
    posterior = calibrated.posterior
    assert isinstance(posterior, TreePosterior)
    torch.testing.assert_close(posterior.probabilities(x).mean(0), torch.from_numpy(own.predict_proba(x.numpy())))
    assert isinstance(calibrated.before, TreePosterior)
    assert "RandomForestClassifier fitted again to all rows" in calibrated.notes


def test_calibrated_trees_are_stored_and_loaded_without_a_model(tmp_path):
    x = rows()
    found = fitted([HistGradientBoostingClassifier(max_iter=5)], x, (numbers(x)[:, 0] > 0).long(), fast=True)
    found.calibrated.save(tmp_path / "m.dap")
    again = dapcal.load(tmp_path / "m.dap", None)
    for field in ("probs", "distance", "ood_p_value"):
        assert torch.equal(getattr(again(x), field), getattr(found.calibrated(x), field))


def test_estimators_and_the_name_of_the_posterior_go_together():
    x = rows()
    with pytest.raises(ValueError, match="--estimator"):
        fit(x, numbers(x), Gaussian(1.0), 1, Recipe(posterior=ESTIMATOR))
    with pytest.raises(ValueError, match="'ensemble'"):
        fit(x, numbers(x), Gaussian(1.0), 1, Recipe(), estimators=[RandomForestRegressor()])


def test_draws_that_are_all_the_same_are_refused():
    x = rows()
    for estimators, y in (
        ([HistGradientBoostingRegressor(max_iter=3) for _ in range(3)], numbers(x)),
        ([RandomForestClassifier(10, max_features=None)], (x[:, 0] > 10 * x[:, 0].sign()).long()),
    ):
        with pytest.raises(ValueError, match="no spread that could grow with distance"):
            fitted(estimators, x, y, fast=True)


def test_of_a_table_that_is_too_large_a_sample_is_learnt():
    random = np.random.default_rng(0)
    table = pa.table({name: random.normal(size=300) for name in "aby"})
    few = Sample(table.slice(0, 200), np.arange(200), 300)
    recipe = Recipe(posterior=ESTIMATOR)
    estimators = [RandomForestRegressor(10, random_state=0)]
    model = large_tables.fit(few, lambda _: [table], "y", recipe=recipe, estimators=estimators)
    assert "the estimator learns 160 of these rows, and no others" in model.notes
    assert model.calibrated.before is None
    assert model.recipe.draws == 10
