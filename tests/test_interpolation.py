"""Tabulated log Z against its direct evaluation."""

import numpy as np
import pytest
import torch

from dapcal.gaussians import DiagonalGaussian
from dapcal.interpolation import NODES, Tabulated
from dapcal.prior import make_prior

PARAMETERS = 1000


@pytest.fixture(scope="module")
def table():
    """log Z of 1000 parameters as a function of t = log((σ0 + d)/σ0), and the parameters' μ and σ; σ0 = 0.5."""
    rng = np.random.default_rng(0)
    mu, sigma = rng.normal(size=PARAMETERS) * 0.4, rng.uniform(0.001, 0.49, PARAMETERS)
    gaussian, prior = DiagonalGaussian(torch.tensor(mu), torch.tensor(sigma**2)), make_prior({"w": PARAMETERS}, 0.5)
    function = Tabulated(lambda t: gaussian.log_expectation(prior.precision_drop(0.5 * torch.expm1(t)), prior))
    return function, mu, sigma


def direct(mu, sigma, d, sigma0=0.5):
    """From the definition: 1 − cσ² = (1 − σ²/σ0²) + σ²/(σ0 + d)², so that large d loses no digits."""
    c = d * (2 * sigma0 + d) / (sigma0 * (sigma0 + d)) ** 2
    rest = (1 - sigma**2 / sigma0**2) + sigma**2 / (sigma0 + d) ** 2
    return (0.5 * c * mu**2 / rest - 0.5 * np.log1p(-(c * sigma**2))).sum()


def log_widening(d):
    return torch.log1p(torch.as_tensor(d, dtype=torch.float64) / 0.5)


def test_log_z_from_1e_minus_9_to_1e_6(table):
    function, mu, sigma = table
    d = np.logspace(-9, 6, 1500)
    expected = np.array([direct(mu, sigma, value) for value in d])
    got = function(log_widening(d)).numpy()
    assert (np.abs(got - expected) <= np.maximum(1e-10 * np.abs(expected), 1e-9)).all()
    assert (np.diff(got) > -1e-9).all()


def test_small_distances_keep_relative_accuracy(table):
    """log Z ~ ½ c Σ(μ² + σ²) for small c."""
    function, mu, sigma = table
    d = np.logspace(-7, -5, 100)
    c = 1 / 0.25 - 1 / (0.5 + d) ** 2
    got = function(log_widening(d)).numpy()
    np.testing.assert_allclose(got, 0.5 * c * (mu**2 + sigma**2).sum(), rtol=2e-4)


def test_zero_is_exact_among_few_and_among_many(table):
    function, _, _ = table
    for count in (1, 2, NODES + 1, 500):
        t = torch.linspace(0, 4, count, dtype=torch.float64)
        assert function(t)[0] == 0


def test_few_and_many_points_agree(table):
    function, _, _ = table
    t = torch.linspace(0, 9, 700, dtype=torch.float64)
    many = function(t)
    few = torch.cat([function(part) for part in t.split(NODES)])
    torch.testing.assert_close(many, few, rtol=1e-11, atol=1e-10)


def test_order_and_duplicates_do_not_matter(table):
    function, _, _ = table
    t = torch.linspace(0, 6, 300, dtype=torch.float64)
    shuffled = torch.randperm(300, generator=torch.Generator().manual_seed(0)).repeat(2)
    assert torch.equal(function(t[shuffled]), function(t)[shuffled])


def test_interval_ends_are_exact():
    table = Tabulated(torch.exp)
    t = torch.cat([torch.arange(4, dtype=torch.float64), torch.linspace(0.01, 3.99, 100, dtype=torch.float64)])
    assert torch.equal(table(t)[:4], torch.exp(torch.arange(4, dtype=torch.float64)))


@pytest.mark.parametrize("function", [torch.sin, torch.exp, lambda t: 1 / (2.5 + t**2), lambda t: t**7])
def test_smooth_functions(function):
    t = torch.rand(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 5
    torch.testing.assert_close(Tabulated(function)(t), function(t), rtol=1e-12, atol=1e-12)


def test_each_interval_is_evaluated_once():
    asked = []

    def function(t):
        asked.append(len(t))
        return t.cos()

    table = Tabulated(function)
    t = torch.linspace(0, 2.9, 1000, dtype=torch.float64)
    table(t)
    table(t / 2)
    assert asked == [NODES] * 3
