"""Boosted trees as tensors, against scikit-learn, and how they are weighed beside networks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from torch import Tensor, nn

import dapcal
from dapcal.data import Labelled
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.networks.trees import Blend, Trees, from_histograms, logits
from dapcal.posteriors import ensemble
from dapcal.posteriors.network import NetworkPosterior
from dapcal.recipes import Recipe, fit, network
from dapcal.recipes.boosting import EVERY, FEWEST, USUAL, _weighed, same_trees, with_trees

DEPTH = 3


def rows(n: int, seed: int = 0) -> Tensor:
    """Few different values, so that thresholds lie between neighbouring floats too."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, (n, 3), generator=generator) / 3 + torch.randn(n, 3, generator=generator).round() * 1e-7


@pytest.fixture(scope="module")
def steps() -> Labelled:
    """A step that trees find and a small network does not."""
    x = torch.rand(600, 2, generator=torch.Generator().manual_seed(1)) * 8
    y = ((x[:, 0].floor() + x[:, 1].floor()) % 2)[:, None]
    return Labelled(x, y)


@pytest.mark.parametrize("classes", [0, 2, 4])
def test_trees_send_every_row_where_scikit_learn_does(classes: int) -> None:
    x, y = rows(300), rows(300, 1)[:, 0]
    options = {"max_iter": 4, "max_depth": DEPTH, "min_samples_leaf": 3, "early_stopping": False}
    if classes:
        model = HistGradientBoostingClassifier(**options).fit(x.numpy(), (y * 3).round().long().numpy() % classes)
        expected = model.decision_function(x.numpy()).reshape(300, -1)
    else:
        model = HistGradientBoostingRegressor(**options).fit(x.numpy(), y.numpy())
        expected = model.predict(x.numpy())[:, None]
    trees = from_histograms(model, DEPTH, torch.float32)
    assert torch.allclose(trees(x).double(), torch.from_numpy(expected), atol=1e-5)
    assert torch.allclose(trees.first(2)(x), trees.leaves(x)[:, :2].sum(1) + trees.start)
    if classes == 2:
        p = logits(trees(x), 2).softmax(1)
        assert torch.allclose(p.double(), torch.from_numpy(model.predict_proba(x.numpy())), atol=1e-6)


def test_a_number_that_a_threshold_is_rounded_to_goes_where_it_belongs() -> None:
    """Between one and the next float32 lies a double that rounds up: the next float32 must go right all the same."""
    one = torch.tensor(1.0)
    after = torch.nextafter(one, torch.tensor(2.0))
    x = torch.stack([one, after]).repeat(20)[:, None]
    y = (x[:, 0] > 1).double()
    model = HistGradientBoostingRegressor(max_iter=1, max_depth=1, min_samples_leaf=1, early_stopping=False)
    trees = from_histograms(model.fit(x.numpy(), y.numpy()), 1, torch.float32)
    assert trees(x).unique().numel() == 2


@pytest.mark.parametrize(
    ("features", "depth", "looked_up"), [(1, 1, True), (5, 5, True), (5, 6, False), (400, 4, False)]
)
def test_leaves_that_are_looked_up_are_those_walked_to(features: int, depth: int, looked_up: bool) -> None:
    """Equal thresholds, ties with them, and branches that end early; more than 32 leaves or many inputs are walked."""
    generator = torch.Generator().manual_seed(features + depth)
    shape = 130, 3, 2**depth - 1  # more trees than stand in one group
    threshold = torch.randint(-3, 4, shape, generator=generator) / 2
    threshold[:50][torch.rand(50, 3, shape[2], generator=generator) < 0.3] = torch.finfo(torch.float32).max
    trees = Trees(
        torch.randint(features, shape, generator=generator), threshold,
        torch.randn(130, 3, 2**depth, generator=generator), torch.zeros(3),
    )  # fmt: skip
    x = torch.randint(-8, 9, (1500, features), generator=generator) / 4
    assert (trees._masks is not None) == looked_up
    assert torch.equal(trees.leaves(x), trees.walked(x))
    assert torch.equal(trees(x), trees.by_steps(x))
    other = replace(trees, threshold=trees.threshold + torch.randn(shape, generator=generator))
    assert torch.equal(other.leaves(x), other.walked(x))
    assert other(x[:0]).shape == (0, 3)


def posterior_of(data: Labelled, likelihood: Gaussian | Categorical, epochs: int = 1) -> NetworkPosterior:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1 if isinstance(likelihood, Gaussian) else 2))

    return ensemble.fit(make, likelihood, (data.x, data.y), members=2, epochs=epochs, batch_size=100)


def test_outputs_are_weighed(steps: Labelled) -> None:
    plain = posterior_of(steps, Gaussian(1.0))
    trees = Trees(
        torch.zeros(1, 1, 1, dtype=torch.long), torch.full((1, 1, 1), 4.0), torch.tensor([[[-1.0, 2.0]]]),
        torch.tensor([10.0]),
    )  # fmt: skip
    blended = replace(plain, blend=Blend(0.25, 0.5, trees))
    expected = 0.25 * plain.outputs(steps.x) + 0.5 * (10 + torch.where(steps.x[:, :1] <= 4, -1.0, 2.0))
    assert torch.allclose(blended.outputs(steps.x), expected)
    assert torch.allclose(blended.outputs_at(plain.draws, steps.x), expected, atol=1e-6)


def test_trees_that_say_more_weigh_more_and_are_fitted_again(steps: Labelled) -> None:
    train, chooses = steps.subset(torch.arange(500)), steps.subset(torch.arange(500, 600))
    plain = posterior_of(train, Gaussian(1.0))
    blended, told = with_trees(plain, train, chooses, seed=0)
    assert isinstance(blended, NetworkPosterior)
    assert blended.blend is not None
    assert blended.blend.weight > 0.8
    assert blended.blend.share + blended.blend.weight == pytest.approx(1)
    assert told is not None
    assert "boosted trees" in told
    assert len(blended.blend.trees.value) % EVERY == 0
    errors = [float((p.outputs(chooses.x).mean(0) - chooses.y).square().mean()) for p in (plain, blended)]
    assert errors[1] < 0.6 * errors[0]
    again = same_trees(plain, blended, chooses, seed=0, most=EVERY)
    assert isinstance(again, NetworkPosterior)
    assert again.blend is not None
    assert again.blend.weight == blended.blend.weight
    assert len(again.blend.trees.value) == EVERY


def test_few_rows_and_missing_classes_have_no_trees(steps: Labelled) -> None:
    few = steps.subset(torch.arange(FEWEST - 1))
    plain = posterior_of(few, Gaussian(1.0))
    assert with_trees(plain, steps, few, seed=0) == (plain, None)
    labels = Labelled(steps.x, steps.y[:, 0].long())
    classes = posterior_of(labels, Categorical())
    blended, _ = with_trees(classes, labels, labels, seed=0)
    one = labels.subset((labels.y == 0).nonzero().flatten())
    assert same_trees(classes, blended, one, seed=0) is classes


def test_weights_stay_usual_where_rows_say_nothing() -> None:
    """Trees and networks that agree: no weights gain over others."""
    outputs = torch.randn(2, 60, 1, generator=torch.Generator().manual_seed(0))
    found = _weighed(Gaussian(1.0), outputs, outputs.mean(0).expand(3, 60, 1), torch.zeros(60, 1))
    assert (found.share, found.weight) == pytest.approx((1 - USUAL, USUAL))


def test_members_that_learnt_all_rows_predict_and_those_before_are_what_doubts(steps: Labelled, tmp_path) -> None:
    fitted = fit(steps.x, steps.y, Gaussian(1.0), 1, Recipe(epochs=2, members=2, fast=True, hidden=(8,)))
    calibrated, judging = fitted.calibrated, fitted.calibrated.judging
    assert calibrated.before is judging.posterior
    assert judging.before is None
    new, old = calibrated(steps.x[:50]), judging(steps.x[:50])
    assert not torch.equal(new.mean, old.mean)
    assert torch.equal(new.ood_score, old.ood_score)
    assert torch.equal(new.ood_p_value, old.ood_p_value)
    held_out = judging(fitted.held_out.subset(calibrated.judges).x)
    assert torch.allclose(held_out.ood_score.double().sort().values, calibrated.evidence.held_out.double(), atol=1e-5)

    calibrated.save(tmp_path / "m.dap")
    again = dapcal.load(tmp_path / "m.dap", network(2, 1, Recipe(members=2, hidden=(8,))))
    found = again(steps.x[:50])
    assert torch.equal(found.mean, new.mean)
    assert torch.equal(found.ood_p_value, new.ood_p_value)
    x = steps.x[:50] + 0.01  # held-out rows themselves would tie with their own scores
    new, deployed = calibrated(x), calibrated.module()(x)
    assert torch.allclose(deployed.mean, new.mean, atol=1e-6)
    step = 1 / (len(calibrated.evidence.held_out) + 1)  # by which rounding may shift a row that gave a p-value itself
    assert torch.allclose(deployed.ood_p_value, new.ood_p_value, atol=1.01 * step)


def test_what_does_not_fit_is_refused(steps: Labelled, tmp_path) -> None:
    fitted = fit(steps.x, steps.y, Gaussian(1.0), 1, Recipe(epochs=1, members=2, fast=True, hidden=(8,), refit=False))
    posterior = fitted.calibrated.posterior
    assert isinstance(posterior, NetworkPosterior)
    assert posterior.blend is not None
    feature = posterior.blend.trees.feature
    one = feature.clone()
    one[-1, 0, -1] = 2  # a branch that few rows take looks at a third input of two
    for wrong in ({"feature": feature[..., :5]}, {"feature": feature + 99}, {"feature": one}):
        blend = replace(posterior.blend, trees=replace(posterior.blend.trees, **wrong))
        replace(fitted.calibrated, posterior=replace(posterior, blend=blend)).save(tmp_path / "m.dap")
        with pytest.raises(ValueError, match="save it again"):
            dapcal.load(tmp_path / "m.dap", network(2, 1, Recipe(members=2, hidden=(8,))))
