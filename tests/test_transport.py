"""Transport: the exact Gaussian move against heavily sampled Reweight, quadrature and its own exact evaluation."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from scipy.special import expit
from torch import nn

from cases import doubles, inputs, network_posterior
from dapcal.adjust import Reweight, Transport
from dapcal.ensembles import base_ensemble
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian, NoiseHead
from dapcal.posteriors import gaussian, map, samples
from dapcal.posteriors.predictions import StackedPredictions

LIKELIHOODS = [(Categorical(), 3), (Bernoulli(), 1), (Gaussian(0.3), 2), (NoiseHead(), 4)]
DRAWS = 40_000


def one_weight(likelihood, mean, sigma, draws, **prior):
    """y = weight · x."""
    model = nn.Linear(1, 1, bias=False).double()
    moments = {"mean": {"weight": doubles([[mean]])}, "draws": draws}
    return gaussian.diagonal(model, likelihood, {"weight": doubles([[sigma]])}, **moments, **prior)


def line(features, likelihood, draws, **prior):
    """y = weight · x + bias with correlated parameters."""
    model = nn.Linear(features, 1).double()
    covariance = 0.12 * np.ones((features + 1, features + 1)) + np.diag([0.05, 0.1, 0.02][: features + 1])
    means = {"weight": doubles([[0.9, 0.5][:features]]), "bias": doubles([0.6])}
    names = ["weight", "bias"]
    return gaussian.full(model, likelihood, torch.tensor(covariance), names, mean=means, draws=draws, **prior)


POSTERIORS = {
    "one parameter": lambda likelihood: one_weight(likelihood, 0.5, 0.45, DRAWS),
    "full, three parameters": lambda likelihood: line(2, likelihood, DRAWS),
    "full, weights alone": lambda likelihood: line(2, likelihood, DRAWS, aware="weight"),
    "full, bias alone": lambda likelihood: line(1, likelihood, DRAWS, prior_scale=0.8, aware="bias"),
    "full, two groups": lambda likelihood: line(1, likelihood, DRAWS, aware={"weight": 1.0, "bias": 0.4}),
}


@pytest.mark.parametrize(
    ("name", "likelihood"),
    [(name, Bernoulli() if name == "full, bias alone" else Gaussian(0.5)) for name in POSTERIORS],
)
def test_shift_agrees_with_heavily_sampled_reweight(name, likelihood):
    posterior = POSTERIORS[name](likelihood)
    x = doubles([[1.2, 0.8], [-0.5, 1.5]])[:, : posterior.model.in_features]
    distance = doubles([0.5, 0.7])
    moved = likelihood.mean(Transport(shift=True, step=None)(posterior, x)(distance))
    weighted = Reweight(normalise=True)(posterior, x)(distance)
    values = weighted.conditional.mean
    expected = likelihood.mean(weighted)
    # standard errors of a self-normalised mean and of a plain one over as many draws
    squared = (weighted.log_weights.exp()[..., None] * (values - expected)) ** 2
    error = squared.sum(0).sqrt() + values.std(0) / math.sqrt(DRAWS)
    assert error.max() < 0.02
    assert ((moved - expected).abs() < 4 * error).all()
    base = likelihood.mean(base_ensemble(likelihood, posterior.outputs(x)))
    assert ((moved - base).abs() > 8 * error).any()  # the check can fail


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("d", [0.2, 1.0, 5.0])
def test_one_weight_against_quadrature(d, shift):
    """E[sigmoid(θ x)] under N(μ or μ_d, σ_d²), σ_d² = σ²/(1 − cσ²), μ_d = μ/(1 − cσ²)."""
    mu, sigma, x = 0.5, 0.7, 1.5
    factor = 1 / (1 - (1 - 1 / (1 + d) ** 2) * sigma**2)
    center, deviation = mu * (factor if shift else 1), sigma * math.sqrt(factor)
    expected, _ = integrate.quad(
        lambda t: expit(t * x) * stats.norm.pdf(t, center, deviation), center - 10 * deviation, center + 10 * deviation
    )
    posterior = one_weight(Bernoulli(), mu, sigma, DRAWS)
    ensemble = Transport(shift=shift, step=None)(posterior, doubles([[x]]))(doubles([d]))
    error = ensemble.conditional.mean[:, 0, 1].std().item() / math.sqrt(DRAWS)
    assert Bernoulli().mean(ensemble)[0, 1].item() == pytest.approx(expected, abs=4 * error)


def test_the_draws_keep_their_noise():
    """Outputs are (μ or μ_d) x + σ_d ε x with the ε of the base draws."""
    mu, sigma, d = 0.5, 0.6, 0.9
    posterior, x = one_weight(Gaussian(0.3), mu, sigma, 20), doubles([[2.0], [-1.0]])
    noise = (posterior.draws - mu) / sigma  # (S, 1)
    factor = 1 / (1 - (1 - 1 / (1 + d) ** 2) * sigma**2)
    for shift, center in ((False, mu), (True, mu * factor)):
        outputs = Transport(shift=shift, step=None)(posterior, x)(doubles([d, d])).outputs
        torch.testing.assert_close(outputs[..., 0], (center + sigma * math.sqrt(factor) * noise) * x[:, 0])


def test_keeping_the_mean_and_shifting_it_differ():
    posterior, x = line(1, Gaussian(0.5), 500), doubles([[1.0], [2.0]])
    keep, shift = (Transport(shift=s)(posterior, x)(doubles([1.0, 1.0])) for s in (False, True))
    torch.testing.assert_close(keep.outputs.var(0), shift.outputs.var(0))
    assert ((keep.outputs.mean(0) - shift.outputs.mean(0)).abs() > 0.02).all()
    assert (keep.outputs.var(0) > posterior.outputs(x).var(0)).all()


@pytest.mark.parametrize(("likelihood", "outputs"), LIKELIHOODS)
@pytest.mark.parametrize("shift", [False, True])
def test_the_grid_is_close_to_exact(likelihood, outputs, shift):
    posterior, x = network_posterior(likelihood, outputs), inputs(8)
    distances = torch.logspace(-2, 2, 8, dtype=torch.float64)
    exact = Transport(shift, step=None)(posterior, x)(distances)
    errors = []
    for step in (0.2, 0.1, 0.05):
        close = Transport(shift, step)(posterior, x)(distances)
        errors.append((close.outputs - exact.outputs).abs().max().item())
        if step == 0.1:
            torch.testing.assert_close(likelihood.mean(close), likelihood.mean(exact), rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(likelihood.variance(close), likelihood.variance(exact), rtol=5e-3, atol=1e-3)
    assert errors[0] > 2 * errors[1] > 4 * errors[2] > 0  # linear interpolation: error ~ step²


def test_levels_of_the_grid_are_exact():
    posterior, x = network_posterior(Categorical(), 3), inputs(3)
    distances = torch.expm1(doubles([0.5, 1.0, 2.5]))
    on_grid = Transport(step=0.5)(posterior, x)(distances).outputs
    torch.testing.assert_close(on_grid, Transport(step=None)(posterior, x)(distances).outputs)


@pytest.mark.parametrize("step", [0.1, None])
def test_inputs_do_not_touch_each_other(step):
    posterior, x = network_posterior(Categorical(), 3), inputs(12)
    distances = torch.rand(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4
    together = Transport(step=step)(posterior, x)(distances).outputs
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    shuffled = Transport(step=step)(posterior, x[order])(distances[order]).outputs
    torch.testing.assert_close(shuffled, together[:, order])
    parts = [slice(0, 5), slice(5, 12)]
    split = torch.cat([Transport(step=step)(posterior, x[p])(distances[p]).outputs for p in parts], 1)
    torch.testing.assert_close(split, together)


def test_only_the_aware_parameters_move():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    deviations = {n: torch.full_like(p, 0.3) for n, p in model.named_parameters()}
    posterior = gaussian.diagonal(model, Gaussian(0.3), deviations, draws=20, aware="2.bias")
    x, d = inputs(4), doubles([0.5, 1.0, 2.0, 9.0])
    moved = Transport(step=None)(posterior, x)(d).outputs[..., 0] - posterior.outputs(x)[..., 0]
    deviation = posterior.draws[:, -1:] - posterior.gaussian.mean[-1]
    stretch = (1 - (1 - 1 / (1 + d) ** 2) * 0.3**2) ** -0.5
    torch.testing.assert_close(moved, deviation * (stretch - 1).float(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("likelihood", "outputs"), LIKELIHOODS)
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("step", [0.1, None])
def test_distance_zero_gives_back_the_base_posterior(likelihood, outputs, shift, step):
    posterior, x = network_posterior(likelihood, outputs), inputs(10)
    base = base_ensemble(likelihood, posterior.outputs(x))
    adjusted = Transport(shift, step)(posterior, x)
    mixed = torch.linspace(0, 3, 10, dtype=torch.float64)
    mixed[5:] = 0
    for d, rows in ((torch.zeros(10), slice(None)), (mixed, slice(5, None))):
        ensemble = adjusted(d)
        assert torch.equal(ensemble.outputs[:, rows], base.outputs[:, rows])
        assert torch.equal(ensemble.log_weights, base.log_weights)
        for statistic in (likelihood.mean, likelihood.variance, likelihood.entropy, likelihood.aleatoric):
            assert torch.equal(statistic(ensemble)[rows], statistic(base)[rows])


def test_unattainable_groups_are_named():
    covariance = doubles([[0.9, 0.88], [0.88, 0.9]])
    model = nn.Linear(1, 1).double()
    aware = {"weight": 1.0, "bias": 2.0}
    posterior = gaussian.full(model, Gaussian(0.5), covariance, ["weight", "bias"], aware=aware)
    with pytest.raises(ValueError, match="'weight', 'bias'"):
        Transport()(posterior, doubles([[1.0]]))(doubles([5.0]))


def test_posteriors_without_moments_or_prior_are_refused():
    models = [nn.Linear(2, 3) for _ in range(4)]
    brought = samples.from_state_dicts(models[0], Categorical(), [m.state_dict() for m in models], prior_scale=1.0)
    stacked = StackedPredictions(lambda x: torch.randn(5, len(x), 3), Categorical())
    priorless = replace(network_posterior(Categorical(), 3), prior=None)
    for posterior in (brought, stacked, priorless, map.point(models[0], Categorical())):
        with pytest.raises(ValueError, match=r"Transport needs a Gaussian posterior.*Inflate"):
            Transport()(posterior, inputs(2))


def test_single_draw_is_refused():
    with pytest.raises(ValueError, match="single network"):
        Transport()(network_posterior(Categorical(), 3, draws=1), inputs(2))


@pytest.mark.parametrize("step", [0.0, -0.1, math.nan])
def test_bad_steps_are_refused(step):
    with pytest.raises(ValueError, match="step"):
        Transport(step=step)(network_posterior(Categorical(), 3), inputs(2))
