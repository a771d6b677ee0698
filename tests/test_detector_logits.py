"""Scores of logits, temperature scaling, ViM and fDBD against numpy and scipy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_softmax, logsumexp, softmax
from scipy.stats import entropy
from torch import nn

from dapcal.detectors import fdbd, logits, temperature, vim
from dapcal.types import DapcalWarning
from detector_cases import blobs, mlp, seen, trained


@pytest.fixture(scope="module")
def case():
    """A network in float64, training data, and test inputs."""
    torch.manual_seed(0)
    x, y = blobs(150)
    network = trained(mlp(7), x, y, steps=150).double()
    return network, (x.double(), y), 2 * blobs(40, seed=2)[0].double()


def held_out(n: int = 200, wrong: int = 20):
    """Inputs of which some have a wrong label."""
    x, y = blobs(n, seed=3)
    return x.double(), torch.where(torch.arange(n) < wrong, (y + 1) % 3, y)


class Fixed(nn.Module):
    """Logits that are the inputs."""

    def forward(self, x):
        return x


def test_scores_of_logits_are_their_formulas(case):
    network, _, x = case
    f = seen(network, x)[1].numpy()
    p = softmax(f, 1)
    np.testing.assert_allclose(logits.max_softmax(network)(x), 1 - p.max(1), rtol=1e-9)
    np.testing.assert_allclose(logits.entropy(network)(x), entropy(p, axis=1), rtol=1e-9)
    np.testing.assert_allclose(logits.max_logit(network)(x), -f.max(1), rtol=1e-12)
    np.testing.assert_allclose(logits.energy(network)(x), -logsumexp(f, 1), rtol=1e-12)
    np.testing.assert_allclose(logits.energy(network, temperature=3.0)(x), -3 * logsumexp(f / 3, 1), rtol=1e-12)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_energy_refuses_a_temperature(case, value):
    with pytest.raises(ValueError, match="`temperature` > 0"):
        logits.energy(case[0], temperature=value)


def test_confident_predictions_do_not_tie():
    f = torch.tensor([[40.0, 0.0, 0.0], [60.0, 0.0, 0.0], [80.0, 0.0, 0.0]])
    assert (f.softmax(1).max(1).values == 1).all()
    scores = logits.max_softmax(Fixed())(f)
    assert (scores.diff() < 0).all()
    np.testing.assert_allclose(scores, 2 * np.exp([-40.0, -60.0, -80.0]), rtol=1e-6)
    assert (logits.entropy(Fixed())(f).diff() < 0).all()


def test_extreme_logits_have_finite_scores():
    f = torch.tensor([[1e6, -1e6, 0.0], [0.0, 0.0, 0.0], [-1e6, -1e6, -1e6]])
    assert logits.entropy(Fixed())(f).tolist() == pytest.approx([0, np.log(3), np.log(3)])
    assert logits.max_softmax(Fixed())(f).tolist() == pytest.approx([0, 2 / 3, 2 / 3])
    assert logits.energy(Fixed())(f).isfinite().all()


def test_temperature_is_the_minimum_of_the_nll(case):
    network, _, x = case
    data = held_out()
    f = seen(network, data[0])[1].numpy()

    def nll(t):
        return -log_softmax(f / t, 1)[np.arange(len(f)), data[1]].mean()

    fitted = temperature.fit(network, data)
    expected = minimize_scalar(nll, bracket=(0.5, 2.0), tol=1e-10).x
    assert fitted.temperature == pytest.approx(expected, rel=1e-4)
    assert nll(fitted.temperature) < nll(1.0) - 0.1
    p = softmax(seen(network, x)[1].numpy() / fitted.temperature, 1)
    np.testing.assert_allclose(fitted.probs(x), p, rtol=1e-9)
    np.testing.assert_allclose(fitted(x), entropy(p, axis=1), rtol=1e-9)


def test_temperature_recovers_the_scale_of_logits(case, generator):
    f = 2 * torch.randn(4000, 5, generator=generator).double()
    y = torch.multinomial(f.softmax(1), 1, generator=generator)[:, 0]
    assert temperature.best_temperature(f, y) == pytest.approx(1, rel=0.05)
    assert temperature.best_temperature(7 * f, y) == pytest.approx(7 * temperature.best_temperature(f, y), rel=1e-5)


def test_the_scaled_network_is_a_network(case):
    network, _, x = case
    fitted = temperature.fit(network, held_out())
    scaled = fitted.scaled
    torch.testing.assert_close(scaled(x), network.eval()(x) / fitted.temperature)
    network.train()
    torch.testing.assert_close(logits.entropy(scaled)(x), fitted(x))
    np.testing.assert_allclose(logits.max_softmax(scaled)(x), 1 - fitted.probs(x).max(1).values, rtol=1e-9)


def test_temperature_warns_where_there_is_no_minimum(case):
    x, _ = held_out()
    y = seen(case[0], x)[1].argmax(1)
    with pytest.warns(DapcalWarning, match=r"no minimum at a temperature between 0\.001 and 1000.*hold out more data"):
        temperature.fit(case[0], (x, y))
    with pytest.warns(DapcalWarning, match="no better than by chance"):
        temperature.fit(case[0], (x, (y + 1) % 3))


@pytest.mark.parametrize("dimension", [None, 0, 2, 6])
def test_vim_is_the_papers_code(case, dimension):
    network, (x, y), test = case
    weight, bias = (t.detach().numpy() for t in (network[-1].weight, network[-1].bias))
    (train_z, train_f), (z, f) = ([t.numpy() for t in seen(network, some)] for some in (x, test))
    origin = -np.linalg.pinv(weight) @ bias
    values, vectors = np.linalg.eig((train_z - origin).T @ (train_z - origin) / len(train_z))
    rest = vectors[:, np.argsort(-values)[3 if dimension is None else dimension :]]
    alpha = train_f.max(1).mean() / np.linalg.norm((train_z - origin) @ rest, axis=1).mean()
    virtual = alpha * np.linalg.norm((z - origin) @ rest, axis=1)
    detector = vim.fit(network, (x, y), dimension=dimension)
    assert detector.scale == pytest.approx(alpha)
    np.testing.assert_allclose(detector(test), virtual - logsumexp(f, 1), rtol=1e-6)
    probability = softmax(np.concatenate([f, virtual[:, None]], 1), 1)[:, -1]
    np.testing.assert_allclose(expit(detector(test).numpy()), probability, rtol=1e-6)  # rank-equivalent


@pytest.mark.parametrize(
    ("features", "expected"), [(7, 3), (512, 256), (767, 383), (768, 512), (2047, 512), (2048, 1000)]
)
def test_vim_default_dimension(features, expected):
    assert vim._default_dimension(features) == expected


@pytest.mark.parametrize("dimension", [-1, 7])
def test_vim_refuses_a_dimension(case, dimension):
    with pytest.raises(ValueError, match=rf"`dimension` between 0 and 6 \(one less than features\), got {dimension}"):
        vim.fit(case[0], case[1], dimension=dimension)


def test_vim_needs_a_residual():
    x, y = blobs(60)
    network = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 3))  # features in a plane
    with pytest.raises(ValueError, match="pass a smaller `dimension`"):
        vim.fit(network, (x, y))
    assert vim.fit(network, (x, y), dimension=1)(x).isfinite().all()


def test_fdbd_is_a_loop_over_boundaries(case):
    network, (x, y), test = case
    weight = network[-1].weight.detach().numpy()
    mean = seen(network, x)[0].numpy().mean(0)
    expected = []
    for z, f in zip(*(t.numpy() for t in seen(network, test)), strict=True):
        best = f.argmax()
        ways = [abs(f[best] - f[c]) / np.linalg.norm(weight[best] - weight[c]) for c in range(3) if c != best]
        expected.append(-np.mean(ways) / np.linalg.norm(z - mean))
    np.testing.assert_allclose(fdbd.fit(network, (x, y))(test), expected, rtol=1e-9)


def test_fdbd_distances_are_those_to_the_boundary(case):
    """Moving features by the distance along w_ŷ − w_c makes the two logits equal."""
    network, (x, y), test = case
    head = network[-1]
    z, f = seen(network, test)
    detector = fdbd.fit(network, (x, y))
    top, best = f.max(1)
    for c in range(3):
        gap = detector.gaps[best, c]
        way = (head.weight[best] - head.weight[c]).detach()
        moved = head(z - way * ((top - f[:, c]) / gap.where(gap > 0, 1.0) ** 2)[:, None])
        torch.testing.assert_close(moved.gather(1, best[:, None])[:, 0], moved[:, c])


def test_fdbd_leaves_out_classes_without_a_boundary(case):
    network, (x, y), test = case
    wide = nn.Sequential(*network[:-1], nn.Linear(7, 4)).double()
    with torch.no_grad():
        wide[-1].weight.copy_(torch.cat([network[-1].weight, network[-1].weight[:1]]))
        wide[-1].bias.copy_(torch.cat([network[-1].bias, network[-1].bias[:1] - 1]))
    first = seen(network, test)[1].argmax(1) == 0
    assert first.any()
    torch.testing.assert_close(fdbd.fit(wide, (x, y))(test)[first], fdbd.fit(network, (x, y))(test)[first])
    with torch.no_grad():
        wide[-1].weight.zero_()
    with pytest.raises(ValueError, match="different weights in the last layer"):
        fdbd.fit(wide, (x, y))


def test_fdbd_at_the_mean_is_finite():
    x, y = torch.tensor([[-1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])
    network = nn.Sequential(nn.Linear(2, 2))
    assert fdbd.fit(network, (x, y))(torch.zeros(1, 2)).isfinite().all()
    assert fdbd.fit(network, (x[:1], y[:1]))(x).isfinite().all()
