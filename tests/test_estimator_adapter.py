"""Estimators in scikit-learn's manner as draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.ensemble import GradientBoostingRegressor, RandomForestClassifier, RandomForestRegressor

import dapcal
from dapcal.adapters.estimators import from_estimators
from dapcal.likelihoods import Categorical, Gaussian, Poisson


@pytest.fixture(scope="module")
def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(240, 2, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(2, 240, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > noise[0]).long() + (x[:, 1] > 0.5 + noise[1]).long()  # many are classified wrongly


def test_trees_of_a_forest_are_draws(data, tmp_path):
    x, y = data
    forest = RandomForestClassifier(8, max_depth=4, random_state=0).fit(x[:120].numpy(), y[:120].numpy())
    posterior = from_estimators(forest.estimators_, Categorical(), smoothing=1e-9)
    mean = posterior.outputs(x).exp().mean(0)
    np.testing.assert_allclose(mean.numpy(), forest.predict_proba(x.numpy()), atol=1e-6)
    calibrated = dapcal.calibrate(
        from_estimators(forest.estimators_, Categorical()), train=(x[:120], y[:120]), held_out=(x[120:], y[120:])
    )
    near, far = (calibrated(rows).probs.max(1).values.mean() for rows in (x, 30 * x))
    assert far < near
    calibrated.save(tmp_path / "forest.dap")
    again = dapcal.load(tmp_path / "forest.dap", from_estimators(forest.estimators_, Categorical()).function)
    torch.testing.assert_close(again(x).probs, calibrated(x).probs)


def test_numbers_are_those_of_the_members(data):
    x, _ = data
    y = x.sum(1).numpy()
    models = [GradientBoostingRegressor(n_estimators=5, subsample=0.5, random_state=s).fit(x, y) for s in range(3)]
    outputs = from_estimators(models, Gaussian(0.3)).outputs(x)
    np.testing.assert_allclose(outputs[:, :, 0].numpy(), [model.predict(x) for model in models], rtol=1e-5)


def test_a_class_that_one_member_never_saw_is_unlikely_to_it(data):
    x, y = data
    members = [
        RandomForestClassifier(2, random_state=0).fit(x[rows].numpy(), y[rows].numpy())
        for rows in (torch.ones(240, dtype=torch.bool), y < 2)
    ]
    assert from_estimators(members, Categorical()).outputs(x)[1, :, 2].exp().max() == pytest.approx(0.01 / 3)


def test_what_cannot_be_a_draw_is_refused(data):
    x, y = data
    one = RandomForestRegressor(1).fit(x.numpy(), y.numpy())
    with pytest.raises(ValueError, match="two estimators"):
        from_estimators([one], Gaussian(1.0))
    with pytest.raises(TypeError, match="predict_proba"):
        from_estimators([one, one], Categorical())
    with pytest.raises(TypeError, match="Categorical"):
        from_estimators([one, one], Poisson())
    with pytest.raises(ValueError, match="smoothing"):
        from_estimators([one, one], Gaussian(1.0), smoothing=0)
