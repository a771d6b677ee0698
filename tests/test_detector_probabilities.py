"""Density-aware calibration and Gaussian-process activations against loops, scikit-learn and Monte Carlo."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import optimize
from scipy.optimize import check_grad, minimize
from scipy.special import log_softmax
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF
from sklearn.neighbors import NearestNeighbors
from torch import nn

from dapcal.detectors import dac, gapa, temperature
from detector_cases import blobs, cnn, images, mlp, seen, trained


@pytest.fixture(scope="module")
def case():
    """A network in float64, training data, and test inputs."""
    torch.manual_seed(0)
    x, y = blobs(120)
    network = trained(mlp(7), x, y, steps=150).double()
    return network, (x.double(), y), 2 * blobs(40, seed=2)[0].double()


def held_out(n: int = 150, spread: float = 1.6):
    """Wider than the training data, so that errors come with distance."""
    x, y = blobs(n, seed=3)
    generator = torch.Generator().manual_seed(4)
    return (x + spread * torch.rand(n, 1, generator=generator) * torch.randn(n, 2, generator=generator)).double(), y


def nll(weights, distances, logits, labels):
    scaled = logits / (distances @ weights[:-1] + weights[-1])[:, None]
    return -log_softmax(scaled, 1)[np.arange(len(labels)), labels].mean()


def distances_of(network, train, test, k, unit=True):
    """k-th neighbour distances in all layers, by scikit-learn."""

    def layers(x):
        with torch.no_grad():
            first = network[0](x)
            second = network[2](network[1](first))
            features = network[3](second)
            points = [first, second, features, network[4](features)]
        return [nn.functional.normalize(p).numpy() if unit else p.numpy() for p in points]

    return np.stack(
        [
            NearestNeighbors(n_neighbors=k).fit(a).kneighbors(b)[0][:, -1]
            for a, b in zip(layers(train), layers(test), strict=True)
        ],
        1,
    )


@pytest.mark.parametrize("unit", [True, False])
def test_dac_temperature_is_the_weighted_sum_of_neighbour_distances(case, unit):
    network, (x, y), test = case
    fitted = dac.fit(network, (x, y), held_out(), k=5, unit=unit)
    assert fitted.layers == ("0", "2")
    assert len(fitted.indices) == 4
    assert (fitted.weights >= 0).all()
    expected = distances_of(network, x, test, 5, unit) @ fitted.weights.numpy() + fitted.offset
    np.testing.assert_allclose(fitted.temperature(test), expected, rtol=1e-6)
    p = (seen(network, test)[1] / torch.as_tensor(expected)[:, None]).softmax(1)
    np.testing.assert_allclose(fitted.probs(test), p, rtol=1e-5, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Values in x were outside bounds")  # by rounding, in scipy 1.13
def test_dac_weights_minimise_the_held_out_nll(case):
    network, (x, y), _ = case
    data = held_out()
    fitted = dac.fit(network, (x, y), data, k=5)
    distances, logits = distances_of(network, x, data[0], 5), seen(network, data[0])[1].numpy()
    found = nll(np.append(fitted.weights, fitted.offset), distances, logits, data[1])
    starts = np.random.default_rng(0).uniform(0.1, 5, (8, 5))
    bounds = [(0, None)] * 4 + [(dac.LEAST, None)]
    others = [minimize(nll, s, (distances, logits, data[1]), "SLSQP", bounds=bounds, tol=1e-10).fun for s in starts]
    assert found <= min(others) + 1e-5
    assert (fitted.weights > 0).any()
    t = temperature.fit(network, data).temperature
    assert found < nll(np.array([0, 0, 0, 0, t]), distances, logits, data[1]) - 1e-3


def test_dac_weights_without_information_are_temperature_scaling(generator):
    f = 6 * torch.randn(300, 4, generator=generator).double()
    y = torch.multinomial((f / 3).softmax(1), 1, generator=generator)[:, 0]
    weights, offset = dac.fit_weights(torch.zeros(300, 2).double(), f, y)
    assert offset == pytest.approx(temperature.best_temperature(f, y), rel=1e-3)
    assert weights.isfinite().all()


def test_dac_recovers_weights(generator):
    distances = torch.rand(20000, 2, generator=generator).double() * torch.tensor([1.0, 50.0])
    f = 5 * torch.randn(20000, 4, generator=generator).double()
    true = distances @ torch.tensor([2.0, 0.04]).double() + 0.5
    y = torch.multinomial((f / true[:, None]).softmax(1), 1, generator=generator)[:, 0]
    weights, offset = dac.fit_weights(distances, f, y)
    np.testing.assert_allclose([*weights, offset], [2.0, 0.04, 0.5], rtol=0.15)


def test_dac_gradient(monkeypatch, generator):
    seen_by_scipy = {}
    monkeypatch.setattr(optimize, "minimize", lambda f, at, **_: seen_by_scipy.update(f=f) or minimize(f, at, jac=True))
    f, y = torch.randn(50, 3, generator=generator).double(), torch.arange(50) % 3
    dac.fit_weights(torch.rand(50, 2, generator=generator).double(), f, y)
    loss = seen_by_scipy["f"]
    assert check_grad(lambda w: loss(w)[0], lambda w: loss(w)[1], np.array([0.5, 0.2, 0.7])) < 1e-6


def test_dac_layers_by_default_and_by_name(case):
    network, train, _ = case
    x, y = images(60)
    torch.manual_seed(0)
    pictures = dac.fit(trained(cnn(), x, y), (x, y), images(40, seed=1), k=3)
    assert pictures.layers == ("0", "3")
    assert [index.points.shape[1] for index in pictures.indices] == [6, 10, 10, 3]
    deep = nn.Sequential(*[nn.Linear(2, 2) for _ in range(8)], nn.Linear(2, 3)).double()
    assert dac.fit(deep, train, held_out(), k=3).layers == ("0", "4", "7")
    assert dac.fit(network, train, held_out(), k=3, layers=[]).weights.shape == (2,)
    with pytest.raises(ValueError, match=r"`layers` among the linear .* got \['1'\]; they are \['0', '2', '4'\]"):
        dac.fit(network, train, held_out(), k=3, layers=["1"])


def test_dac_farther_inputs_are_less_certain(case):
    network, train, _ = case
    fitted = dac.fit(network, train, held_out(), k=5, unit=False)
    assert fitted.temperature(50 * train[0]).mean() > 3 * fitted.temperature(train[0]).mean()


def points_of(network, x):
    with torch.no_grad():
        return network[:3](x).numpy()


@pytest.mark.parametrize("k", [1, 6, 120])
def test_gapa_variance_is_a_gaussian_process_on_the_neighbours(case, k):
    network, (x, y), test = case
    fitted = gapa.fit(network, (x, y), k=k)
    assert fitted.layer == "2"
    train, points = points_of(network, x), points_of(network, test)
    weight, variance = network[-1].weight.detach().numpy(), seen(network, x)[0].numpy().var(0)
    expected = []
    for point in points:
        nearest = train[np.argsort(np.linalg.norm(train - point, axis=1))[:k]]
        process = GaussianProcessRegressor(RBF(fitted.length_scale), alpha=gapa.NOISE, optimizer=None)
        left = process.fit(nearest, np.zeros(k)).predict(point[None], return_std=True)[1][0] ** 2
        expected.append([sum(w**2 * v * left for w, v in zip(row, variance, strict=True)) for row in weight])
    np.testing.assert_allclose(fitted.logit_variance(test), expected, rtol=1e-4, atol=1e-6)


def test_gapa_length_scale_is_the_median_distance(case):
    network, (x, y), _ = case
    points = torch.as_tensor(points_of(network, x))
    assert gapa.fit(network, (x, y)).length_scale == pytest.approx(torch.pdist(points).median().item(), rel=0.06)
    assert gapa.fit(network, (x, y), length_scale=0.7).length_scale == 0.7
    with pytest.raises(ValueError, match="`length_scale` > 0"):
        gapa.fit(network, (x, y), length_scale=0.0)


def test_gapa_propagates_activations_to_logits(case, generator):
    """Independent Gaussian activations through the last layer have the logits' variance."""
    network, (x, y), test = case
    fitted = gapa.fit(network, (x, y), k=6)
    left = fitted.logit_variance(test[:1])[0] / fitted.variance
    features = seen(network, x)[0]
    noise = torch.randn(100000, 7, generator=generator).double() * (features.var(0, correction=0) * left[0]).sqrt()
    drawn = network[-1](seen(network, test[:1])[0] + noise).detach()
    torch.testing.assert_close(drawn.var(0), fitted.logit_variance(test[:1])[0], rtol=0.03, atol=0)
    torch.testing.assert_close(drawn.mean(0), seen(network, test[:1])[1][0], rtol=0, atol=0.05)


def test_gapa_probabilities_are_mackays(case):
    network, (x, y), test = case
    fitted = gapa.fit(network, (x, y), k=6)
    logits = seen(network, test)[1] / (1 + torch.pi / 8 * fitted.logit_variance(test)).sqrt()
    torch.testing.assert_close(fitted.probs(test), logits.softmax(1))


def test_gapa_is_the_network_on_training_inputs_and_wider_off_them(case):
    network, (x, y), _ = case
    fitted = gapa.fit(network, (x, y), k=20)
    p = seen(network, x)[1].softmax(1)
    assert (fitted.logit_variance(x) < 1e-3 * fitted.variance).all()
    torch.testing.assert_close(fitted.probs(x), p, rtol=0, atol=0.01)
    torch.testing.assert_close(fitted.logit_variance(1e3 * x), fitted.variance.expand(120, 3))


def test_gapa_keeps_the_class_where_variances_are_equal(case):
    network, (x, y), test = case
    fitted = gapa.fit(network, (x, y), k=20)
    level = gapa.GAPA(fitted.classifier, fitted.layer, fitted.index, torch.full((3,), 9.0).double(), 1.0, 20)
    assert torch.equal(level.probs(test).argmax(1), seen(network, test)[1].argmax(1))


def test_gapa_compares_features_where_they_are_not_those_of_one_layer():
    torch.manual_seed(0)
    x, y = images(60)
    network = trained(cnn(), x, y)
    fitted = gapa.fit(network, (x, y), k=5)
    assert fitted.layer is None
    torch.testing.assert_close(fitted.index.points, seen(network, x)[0].float())
    assert gapa.fit(nn.Sequential(nn.Linear(2, 3)), blobs(20), k=5).layer is None


def test_gapa_memory_does_not_matter(case):
    network, (x, y), test = case
    fitted = gapa.fit(network, (x, y), k=6)
    small = gapa.GAPA(
        fitted.classifier, fitted.layer, type(fitted.index)(fitted.index.points, 2000), fitted.variance,
        fitted.length_scale, 6,
    )  # fmt: skip
    torch.testing.assert_close(small(test), fitted(test))


def test_gapa_of_duplicates_is_that_of_one_of_each(case):
    network, (x, y), test = case
    twice = gapa.fit(network, (torch.cat([x, x]), torch.cat([y, y])), k=12)
    once = gapa.GAPA(
        twice.classifier,
        twice.layer,
        type(twice.index)(twice.index.points[:120]),
        twice.variance,
        twice.length_scale,
        6,
    )
    torch.testing.assert_close(twice(test), once(test), rtol=1e-2, atol=1e-3)
