"""Members that share weights (TabM): its network, its bins, and what comes of training them side by side."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from dapcal import artifact
from dapcal.data import Labelled
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.networks import TableNetwork
from dapcal.posteriors import sharing
from dapcal.recipes import Recipe, bins, fit, network
from dapcal.recipes.recipe import maker

SMALL = Recipe(posterior="tabm", hidden=(8,), members=3, bins=4, embedding=3, epochs=4, batch_size=32)


def rows(n: int = 90, seed: int = 0) -> Labelled:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator)
    x[:, 1] = (x[:, 1] > 0).float()
    return Labelled(x, x[:, :1].sin() + x[:, 1:2] + 0.1 * torch.randn(n, 1, generator=generator))


def test_a_tree_splits_a_column_where_scikit_learn_splits_it():
    generator = np.random.default_rng(0)
    column = np.round(generator.exponential(size=300), 1)  # many equal values
    y = np.sin(3 * column) + 0.2 * generator.normal(size=300)
    theirs = DecisionTreeRegressor(max_leaf_nodes=7, min_samples_leaf=8).fit(column[:, None], y).tree_
    ours = bins.splits(column, y[:, None], 7, 8)
    np.testing.assert_allclose(sorted(ours), sorted(theirs.threshold[theirs.children_left >= 0]), atol=1e-6)
    labels = (column > 0.7).astype(int) + (column > 2)
    theirs = DecisionTreeClassifier(max_leaf_nodes=3, min_samples_leaf=8).fit(column[:, None], labels).tree_
    ours = bins.splits(column, np.eye(3)[labels], 3, 8)
    np.testing.assert_allclose(sorted(ours), sorted(theirs.threshold[theirs.children_left >= 0]), atol=1e-6)


def test_a_tree_finds_edges_where_most_values_are_equal():
    x = torch.zeros(400, 1)
    x[:60, 0] = torch.linspace(1, 2, 60)  # and no quantile lies there
    y = torch.where(x > 1.5, 2.0, 0.0)
    (few,), (found,) = bins.quantile_edges(x, 4), bins.tree_edges(x, y, 4)
    assert len(few) == 2  # of five quantiles four are 0
    assert ((found - 1.5).abs() < 0.02).any()


def test_edges_fall_back_on_quantiles_where_a_tree_does_not_split():
    x = torch.linspace(0, 1, 100)[:, None]
    (edges,) = bins.tree_edges(x, torch.zeros(100, 1), 4)
    torch.testing.assert_close(edges, torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]), atol=0.01, rtol=0)


def test_numbers_are_inputs_of_three_values_or_more():
    x = torch.tensor([[0.0, 5, 1, 2], [1, 5, 2, 3], [1, 5, 3, 2]])
    assert bins.are_numbers(x).tolist() == [2]


def test_the_place_between_edges_is_linear_and_bounded():
    made = network(2, 1, replace(SMALL, embedding=1), 1)
    assert isinstance(made, TableNetwork)
    assert made.embedding is not None
    made.fit_inputs(torch.tensor([1]), [torch.tensor([0.0, 1.0, 3.0])])
    assert (made.numbers.tolist(), made.others.tolist()) == ([1], [0])
    with torch.no_grad():
        made.embedding.linear.zero_()
        made.embedding.bias.zero_()
        made.embedding.pieces.copy_(torch.tensor([10.0, 100, 7, 7])[None, :, None])  # two bins are not there
    at = torch.tensor([-5.0, 0.5, 1, 2, 3, 1e6])[:, None]
    assert made.embedding(at).flatten().tolist() == [0, 5, 10, 60, 110, 110]


def test_side_by_side_is_what_one_set_learns_alone():
    sets = [rows(seed=seed) for seed in (0, 1)]
    watched = [rows(20, seed=9), rows(20, seed=8)]
    options = {"own": TableNetwork.is_own, "members": 2, "epochs": 2, "batch_size": 30, "seed": 3}
    makes = [maker(one, 1, replace(SMALL, dropout=1e-9), torch.tensor([0, 2])) for one in sets]
    both = sharing.fit_each(makes, Gaussian(), sets, watched, **options)
    alone = sharing.fit_each(makes[:1], Gaussian(), sets[:1], watched[:1], **options)
    assert not torch.allclose(both[0].draws, both[1].draws, atol=1e-3)
    torch.testing.assert_close(both[0].draws, alone[0].draws, atol=1e-4, rtol=1e-4)
    for name, values in alone[0].shared.items():
        torch.testing.assert_close(both[0].shared[name], values, atol=1e-4, rtol=1e-4)
    assert both[0].likelihood.noise == pytest.approx(alone[0].likelihood.noise, rel=1e-4)


def test_the_first_step_is_the_gradient_of_the_mean_loss():
    data = rows(40)
    make = maker(data, 1, replace(SMALL, dropout=1e-9), torch.tensor([0, 2]))
    one = sharing.fit_each(
        [make], Gaussian(), [data], None, own=TableNetwork.is_own, members=2, epochs=2, last=1, batch_size=40,
        learning_rate=0.01, weight_decay=0.0,
    )[0]  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = make()
        torch.manual_seed(1)
        second = make()
    for name, parameter in first.named_parameters():  # the second has the first's weights, but for its own
        if not TableNetwork.is_own(name):
            second.get_parameter(name).data = parameter.data
    losses = [-Gaussian().log_likelihood(member.eval()(data.x), data.y).mean() for member in (first, second)]
    (sum(losses) / 2).backward()
    gradient = first.layers[0].shared.weight.grad + second.layers[0].shared.weight.grad
    step = one.shared["layers.0.shared.weight"] - first.layers[0].shared.weight.detach()
    large = gradient.abs() > 1e-5
    torch.testing.assert_close(step[large], -0.01 * gradient[large].sign(), atol=1e-4, rtol=0)  # Adam's first step


@pytest.mark.parametrize("refit", [False, True])
def test_members_share_weights_and_have_features_of_one_network(refit, tmp_path):
    data = rows(150)
    fitted = fit(data.x, data.y, Gaussian(), 1, replace(SMALL, fast=True, refit=refit, epochs=8))
    posterior = fitted.calibrated.posterior
    assert posterior.outputs(data.x).shape == (3, 150, 1)
    assert not posterior.are_members
    assert {space.name for space in fitted.calibrated.distance.spaces} <= {"features", "inputs"}
    assert "embedding.pieces" in posterior.shared
    assert bool(posterior.central) == refit
    assert (posterior.outputs(data.x).std(0) > 1e-3).all()
    fitted.calibrated.save(tmp_path / "model.dap")
    again = artifact.load(tmp_path / "model.dap", network(3, 1, SMALL, 2))
    torch.testing.assert_close(again(data.x).mean, fitted.calibrated(data.x).mean)
    torch.testing.assert_close(again(3 * data.x).distance, fitted.calibrated(3 * data.x).distance)


def test_classes_gap_cross_validation_and_a_module():
    data = rows(200)
    labels = (data.y[:, 0] > 0.5).long()
    fitted = fit(data.x, labels, Categorical(), 2, replace(SMALL, epochs=6))
    assert fitted.gaps is not None
    assert len(fitted.gaps.regions) >= 3
    fast = fit(data.x, labels, Categorical(), 2, replace(SMALL, epochs=6, fast=True)).calibrated
    found = fast.module()(data.x)
    torch.testing.assert_close(found.mean, fast(data.x).probs, atol=1e-5, rtol=1e-4)


def test_fewer_than_two_members_are_refused():
    with pytest.raises(ValueError, match="members"):
        sharing.fit_each([lambda: None], Gaussian(), [rows()], None, own=TableNetwork.is_own, members=1)
