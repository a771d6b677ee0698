"""Diagnostics of importance weights, with PSIS as arviz-stats computes it as oracle."""

import math

import numpy as np
import pytest
import torch
from arviz_stats.base import array_stats
from scipy.special import logsumexp

from dapcal.diagnostics import MIN_DRAWS, effective_sample_size, pareto_k, pareto_smooth, total_weight

LOG_WEIGHTS = {
    "nearly equal": lambda rng, shape: 1e-3 * rng.normal(size=shape),
    "log-normal": lambda rng, shape: rng.normal(size=shape) - 300,
    "wide log-normal": lambda rng, shape: 6 * rng.normal(size=shape),
    "bounded": lambda rng, shape: np.log(rng.uniform(0.5, 1, shape)),
    "Pareto 0.3": lambda rng, shape: 0.3 * rng.exponential(size=shape),
    "Pareto 1": lambda rng, shape: rng.exponential(size=shape) + 40,
    "Pareto 3": lambda rng, shape: 3 * rng.exponential(size=shape),
    "Cauchy": lambda rng, shape: np.log(np.abs(rng.standard_cauchy(shape))),
    "chi-square": lambda rng, shape: 0.3 * rng.chisquare(30, shape),
}


def psis(log_weights):
    """arviz-stats takes log likelihoods, whose negatives are the log weights of leave-one-out."""
    return array_stats.psislw(-log_weights, axis=0)


@pytest.mark.parametrize("draws", [25, 26, 37, 50, 100, 210, 225, 226, 500, 2000])
@pytest.mark.parametrize("name", LOG_WEIGHTS)
def test_pareto_smoothing_equals_arviz(name, draws):
    log_weights = LOG_WEIGHTS[name](np.random.default_rng(draws), (draws, 6))
    smoothed, k = pareto_smooth(torch.tensor(log_weights))
    expected, expected_k = psis(log_weights)
    np.testing.assert_allclose(k.numpy(), expected_k, rtol=1e-7, atol=1e-9)
    ours = smoothed.numpy()
    np.testing.assert_allclose((ours - logsumexp(ours, 0)).T, expected, rtol=1e-8, atol=1e-9)
    assert torch.equal(pareto_k(torch.tensor(log_weights)), k)


def test_smoothing_keeps_the_scale_and_leaves_the_body():
    log_weights = torch.tensor(LOG_WEIGHTS["Pareto 1"](np.random.default_rng(0), (100, 3)))
    smoothed, _ = pareto_smooth(log_weights)
    order = log_weights.argsort(0)
    body, tail = order[:80], order[80:]
    torch.testing.assert_close(smoothed.gather(0, body), log_weights.gather(0, body), rtol=1e-14, atol=0)
    assert (smoothed.gather(0, tail) != log_weights.gather(0, tail)).any(0).all()
    assert (smoothed.gather(0, order).diff(dim=0) >= -1e-12).all()
    assert (smoothed.max(0).values <= log_weights.max(0).values).all()


def test_more_inputs_than_one_block_and_one_by_one_agree():
    log_weights = torch.tensor(LOG_WEIGHTS["log-normal"](np.random.default_rng(0), (60, 600)))
    smoothed, k = pareto_smooth(log_weights)
    for n in (0, 255, 256, 599):
        alone, k_alone = pareto_smooth(log_weights[:, n : n + 1])
        torch.testing.assert_close(alone[:, 0], smoothed[:, n], rtol=1e-12, atol=0)
        torch.testing.assert_close(k_alone[0], k[n], rtol=1e-10, atol=0)


def test_repeated_weights_equal_arviz():
    rng = np.random.default_rng(1)
    log_weights = np.repeat(rng.normal(size=(60, 4)), 2, axis=0)
    smoothed, k = pareto_smooth(torch.tensor(log_weights))
    expected, expected_k = psis(log_weights)
    np.testing.assert_allclose(k.numpy(), expected_k, rtol=1e-7)
    ours = np.sort(smoothed.numpy(), 0)
    np.testing.assert_allclose((ours - logsumexp(ours, 0)).T, np.sort(expected, -1), rtol=1e-8)


@pytest.mark.parametrize("draws", [2, 10, MIN_DRAWS - 1])
def test_too_few_draws_give_nan_and_stay(draws):
    log_weights = torch.randn(draws, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    smoothed, k = pareto_smooth(log_weights)
    assert k.isnan().all()
    assert torch.equal(smoothed, log_weights)


def test_equal_weights_give_nan_and_stay_beside_others_that_do_not():
    log_weights = torch.randn(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    log_weights[:, 1] = -math.log(50)
    smoothed, k = pareto_smooth(log_weights)
    assert k.isnan().tolist() == [False, True, False]
    assert torch.equal(smoothed[:, 1], log_weights[:, 1])
    assert not torch.equal(smoothed[:, 0], log_weights[:, 0])


@pytest.mark.parametrize("scale", [30.0, 1e3, 1e5, 1e300])
@pytest.mark.parametrize("draws", [25, 50, 400])
def test_collapsed_weights_are_called_so(draws, scale):
    log_weights = scale * torch.randn(draws, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    smoothed, k = pareto_smooth(log_weights)
    assert (k > 0.7).all()
    assert not smoothed.isnan().any()


def test_one_draw_that_takes_all():
    log_weights = torch.full((40, 1), -1e4, dtype=torch.float64)
    log_weights[7] = 0
    assert pareto_k(log_weights).item() > 0.7
    assert effective_sample_size(log_weights).item() == 1


@pytest.mark.parametrize("shift", [-1e4, 0.0, 1e4])
def test_effective_sample_size_of_known_weights(shift):
    cases = torch.tensor([[1.0, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [3, 1, 0, 0], [1, 2, 3, 4]], dtype=torch.float64)
    got = effective_sample_size(cases.T.log() + shift)
    expected = torch.tensor([4, 1, 2, 16 / 10, 100 / 30], dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=0)


def test_effective_sample_size_falls_as_weights_spread():
    noise = torch.randn(200, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ess = effective_sample_size(noise * torch.tensor([0.0, 0.1, 0.5, 1, 3, 10, 1e3], dtype=torch.float64))
    assert ess[0] == pytest.approx(200, rel=1e-14)
    assert (ess.diff() < 0).all()
    assert ess[-1] == pytest.approx(1, abs=1e-6)


def test_total_weight():
    log_weights = torch.tensor([[0.1, 1e-3, 0.25], [0.4, 2.0, 0.25]], dtype=torch.float64).log()
    torch.testing.assert_close(total_weight(log_weights), torch.tensor([0.5, 2.001, 0.5], dtype=torch.float64))
    assert total_weight(log_weights - 1e4).tolist() == [0, 0, 0]
    assert total_weight(torch.full((7, 1), -math.log(7), dtype=torch.float64)).item() == pytest.approx(1, abs=1e-15)
