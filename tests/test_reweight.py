"""Reweight: weights against closed forms, conjugate models and hand computation."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from arviz_stats.base import array_stats
from scipy.special import logsumexp, softmax
from torch import nn

from cases import doubles, inputs, network_posterior
from dapcal.adjust import ClosedForm, PriorMonteCarlo, Reweight, SelfNormalised
from dapcal.diagnostics import effective_sample_size, total_weight
from dapcal.ensembles import base_ensemble
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian, NoiseHead
from dapcal.posteriors import gaussian, map, samples
from dapcal.posteriors.predictions import StackedPredictions

LIKELIHOODS = [(Categorical(), 3), (Bernoulli(), 1), (Gaussian(0.3), 2), (NoiseHead(), 4)]


def line_posterior(mean, covariance, draws, likelihood=None, seed=0, **prior):
    """A full Gaussian over weight and bias of y = weight · x + bias, in float64."""
    model = nn.Linear(1, 1).double()
    means = {"weight": doubles([[mean[0]]]), "bias": doubles([mean[1]])}
    likelihood = likelihood or Gaussian(0.5)
    names = ["weight", "bias"]
    return gaussian.full(model, likelihood, doubles(covariance), names, mean=means, draws=draws, seed=seed, **prior)


def log_z(mean, covariance, c):
    """log E[exp(½ θᵀCθ)] through determinants; C may be singular."""
    mean, matrix = np.asarray(mean), np.eye(len(mean)) - np.asarray(covariance) @ np.diag(c)
    return 0.5 * mean @ np.diag(c) @ np.linalg.solve(matrix, mean) - 0.5 * np.linalg.slogdet(matrix)[1]


def drop(sigma0, d):
    return 1 / sigma0**2 - 1 / (sigma0 + d) ** 2


MEAN, COVARIANCE = [0.4, -0.3], [[0.10, 0.04], [0.04, 0.16]]


@pytest.mark.parametrize("d", [0.05, 0.5, 3.0])
def test_weights_by_hand(d):
    posterior = line_posterior(MEAN, COVARIANCE, 40, prior_scale=0.8)
    got = Reweight()(posterior, doubles([[1.0]]))(doubles([d])).log_weights[:, 0]
    c = drop(0.8, d)
    theta = posterior.draws.numpy()
    expected = 0.5 * c * (theta**2).sum(1) - log_z(MEAN, COVARIANCE, [c, c]) - np.log(40)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-10)


def test_weights_run_over_the_aware_parameters_alone():
    posterior = line_posterior(MEAN, COVARIANCE, 40, aware="bias")
    got = Reweight()(posterior, doubles([[1.0]]))(doubles([0.7])).log_weights[:, 0]
    c = drop(1, 0.7)
    expected = 0.5 * c * posterior.draws[:, 1].numpy() ** 2 - log_z(MEAN, COVARIANCE, [0, c]) - np.log(40)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize("prior", [{}, {"aware": "weight"}, {"aware": {"weight": 1.0, "bias": 0.3}}])
def test_closed_form_weights_have_mean_one_and_the_known_effective_size(prior):
    """E[w] = 1, and ESS/S → Z(c)²/Z(2c) while 2cσ² < 1."""
    draws, d = 30_000, 0.8
    posterior = line_posterior(MEAN, COVARIANCE, draws, **prior)
    log_weights = Reweight()(posterior, doubles([[1.0]]))(doubles([d])).log_weights
    factor = posterior.prior.factor[posterior.prior.group].numpy()
    c = drop(1, factor * d)
    assert 2 * c.max() * np.linalg.eigvalsh(COVARIANCE).max() < 1
    relative = np.exp(2 * log_z(MEAN, COVARIANCE, c) - log_z(MEAN, COVARIANCE, 2 * c))
    error = math.sqrt((1 / relative - 1) / draws)
    assert error < 0.018
    assert total_weight(log_weights).item() == pytest.approx(1, abs=4 * error)
    assert effective_sample_size(log_weights).item() / draws == pytest.approx(relative, rel=0.03)


@pytest.mark.parametrize("scale", [0.01, 0.3, 0.9])
def test_self_normalised_weights_sum_to_one(scale):
    posterior = network_posterior(Categorical(), 3, scale=scale)
    distances = torch.logspace(-9, 6, 40, dtype=torch.float64)
    ensemble = Reweight(SelfNormalised())(posterior, inputs(40))(distances)
    torch.testing.assert_close(total_weight(ensemble.log_weights), torch.ones(40, dtype=torch.float64))
    torch.testing.assert_close(posterior.likelihood.mean(ensemble).sum(1), torch.ones(40, dtype=torch.float64))


@pytest.mark.parametrize("adjust", [Reweight(SelfNormalised()), Reweight(normalise=True)])
def test_normalised_weights_are_a_softmax(adjust):
    posterior = network_posterior(Categorical(), 3)
    distances = doubles([0.1, 1.0, 9.0])
    got = adjust(posterior, inputs(3))(distances).log_weights.exp()
    energy = 0.5 * (posterior.draws.double().numpy() ** 2).sum(1)[:, None] * drop(1, distances.numpy())
    np.testing.assert_allclose(got.numpy(), softmax(energy, 0), rtol=1e-9)


# the conjugate model y = weight · x + bias + noise
X = doubles([[-1.0], [-0.3], [0.4], [0.9], [1.3]])
Y = doubles([[-0.9], [0.1], [0.5], [0.2], [1.0]])
NOISE = 0.6


def conjugate(sigma_weight, sigma_bias):
    """Exact posterior moments of weight and bias."""
    design = np.hstack([X.numpy(), np.ones((5, 1))])
    precision = design.T @ design / NOISE**2 + np.diag([sigma_weight**-2, sigma_bias**-2])
    covariance = np.linalg.inv(precision)
    return (covariance @ design.T @ Y.numpy()[:, 0] / NOISE**2).tolist(), covariance.tolist()


def over_seeds(posterior, distances, x=X, draws=10_000, seeds=8):
    """Mean and standard error of PriorMonteCarlo's log Z over independent seeds."""
    runs = [PriorMonteCarlo(x, Y, draws=draws, seed=seed)(posterior)(distances).numpy() for seed in range(seeds)]
    return np.mean(runs, 0), np.std(runs, 0, ddof=1) / math.sqrt(seeds)


@pytest.mark.parametrize("features", [1, 2])
def test_prior_monte_carlo_of_one_group(features):
    """y = weight · (x, x²), of which one or both are taken."""
    x = torch.cat([X, X**2], 1)[:, :features]
    covariance = np.linalg.inv((x.T @ x).numpy() / NOISE**2 + np.eye(features) / 0.9**2)
    mean = covariance @ (x.T @ Y).numpy()[:, 0] / NOISE**2
    posterior = gaussian.full(
        nn.Linear(features, 1, bias=False).double(),
        Gaussian(NOISE),
        torch.tensor(covariance),
        ["weight"],
        mean={"weight": torch.tensor(mean)[None]},
        prior_scale=0.9,
    )
    distances = doubles([0.0, 0.1, 0.5, 2.0])
    got, error = over_seeds(posterior, distances, x)
    expected = [log_z(mean, covariance, [drop(0.9, d)] * features) for d in distances.tolist()]
    assert got[0] == 0
    assert error.max() < 0.03
    assert (np.abs(got - expected) <= 4 * error).all()
    np.testing.assert_allclose(ClosedForm()(posterior)(distances), expected, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("aware", ["*", "weight", {"weight": 1.0, "bias": 2.0}])
def test_prior_monte_carlo_of_two_groups(aware):
    mean, covariance = conjugate(0.8, 1.5)
    scales = {"weight": 0.8, "bias": 1.5}
    posterior = line_posterior(mean, covariance, 50, Gaussian(NOISE), prior_scale=scales, aware=aware)
    distances = doubles([0.2, 0.9])
    got, error = over_seeds(posterior, distances)
    assert error.max() < 0.03
    factor = {"*": (1, 1), "weight": (1, 0)}.get(aware if isinstance(aware, str) else "", (1, 2))
    expected = [
        log_z(mean, covariance, [drop(0.8, factor[0] * d), drop(1.5, factor[1] * d)]) for d in distances.tolist()
    ]
    assert (np.abs(got - expected) <= 4 * error).all()


def test_prior_monte_carlo_interpolates_beyond_its_levels():
    mean, covariance = conjugate(1.0, 1.0)
    posterior = line_posterior(mean, covariance, 50, Gaussian(NOISE))
    log_z_of = PriorMonteCarlo(X, Y, draws=500, levels=5)(posterior)
    grid = torch.linspace(0, 2, 5, dtype=torch.float64)
    at_grid = log_z_of(grid)
    many = torch.linspace(0, 2, 37, dtype=torch.float64).flip(0)
    got = log_z_of(many)
    np.testing.assert_allclose(got, np.interp(many, grid, at_grid), rtol=1e-10, atol=1e-12)
    assert got[-1] == 0


def test_prior_monte_carlo_in_reweight():
    mean, covariance = conjugate(1.0, 1.0)
    posterior = line_posterior(mean, covariance, 50, Gaussian(NOISE))
    x, d = doubles([[0.3], [1.0]]), doubles([0.0, 0.4])
    monte_carlo = PriorMonteCarlo(X, Y, draws=2000)
    ours, closed = (Reweight(n)(posterior, x)(d).log_weights for n in (monte_carlo, ClosedForm()))
    torch.testing.assert_close(ours, closed, rtol=0, atol=0.2)
    assert torch.equal(ours[:, 0], closed[:, 0])


@pytest.mark.parametrize("levels", [0, 1])
def test_prior_monte_carlo_needs_two_levels(levels):
    with pytest.raises(ValueError, match="levels"):
        PriorMonteCarlo(X, Y, levels=levels)


@pytest.mark.parametrize(("likelihood", "outputs"), LIKELIHOODS[:2])
@pytest.mark.parametrize("heavy", [False, True])
def test_complete_by_hand(likelihood, outputs, heavy):
    """min(W, 1) p̂ + (1 − min(W, 1))/m, whether the draws miss mass or have too much."""
    posterior = network_posterior(likelihood, outputs, draws=30)
    norms = (posterior.draws**2).sum(1)
    rows = norms.argsort()[-10:] if heavy else norms.argsort()[:10]  # draws farther out than typical, or nearer
    posterior = replace(posterior, draws=posterior.draws[rows])
    x, distance = inputs(4), doubles([0.1, 0.3, 0.6, 1.0])
    raw = Reweight()(posterior, x)(distance)
    total = total_weight(raw.log_weights).numpy()
    assert (total > 1).all() if heavy else (total < 0.99).all()
    weights = softmax(raw.log_weights.numpy(), 0)
    logits = posterior.outputs(x).double().numpy()
    if outputs == 1:
        logits = np.concatenate([np.zeros_like(logits), logits], -1)
    normalised = np.einsum("sn,snk->nk", weights, softmax(logits, -1))
    kept = np.minimum(total, 1)[:, None]
    expected = kept * normalised + (1 - kept) / logits.shape[-1]
    got = likelihood.mean(Reweight(complete=True)(posterior, x)(distance)).numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-10)
    np.testing.assert_allclose(got.sum(1), 1, rtol=1e-12)


def test_complete_tends_to_the_most_uncertain_answer():
    """With many parameters and few draws W → 0: all mass is missing."""
    posterior = network_posterior(Categorical(), 3, scale=0.98)
    probabilities = posterior.likelihood.mean(Reweight(complete=True)(posterior, inputs(2))(doubles([100.0, 1e12])))
    torch.testing.assert_close(probabilities, torch.full((2, 3), 1 / 3, dtype=torch.float64), rtol=1e-6, atol=0)


def test_published_probabilities_sum_to_the_total_weight():
    posterior = network_posterior(Categorical(), 3, scale=0.8)
    ensemble = Reweight()(posterior, inputs(3))(doubles([0.3, 1.0, 3.0]))
    total = total_weight(ensemble.log_weights)
    assert (total < 0.9).any()
    torch.testing.assert_close(posterior.likelihood.mean(ensemble).sum(1), total)


def test_published_moments_in_regression():
    """E[w f] and E[w f²] − E[w f]², unnormalised; noise is not weighted."""
    posterior = network_posterior(Gaussian(0.3), 2)
    x, d = inputs(3), doubles([0.05, 0.1, 0.3])
    ensemble = Reweight()(posterior, x)(d)
    weights, f = ensemble.log_weights.exp().numpy()[..., None], posterior.outputs(x).double().numpy()
    mean = (weights * f).sum(0)
    np.testing.assert_allclose(posterior.likelihood.mean(ensemble), mean, rtol=1e-10)
    variance = 0.3**2 + np.maximum((weights * f**2).sum(0) - mean**2, 0)
    np.testing.assert_allclose(posterior.likelihood.variance(ensemble), variance, rtol=1e-6)


def test_smooth_is_pareto_smoothing():
    posterior = network_posterior(Categorical(), 3, draws=100)
    x, d = inputs(2), doubles([0.2, 0.6])
    raw = Reweight()(posterior, x)(d).log_weights.numpy()
    smoothed = Reweight(smooth=True)(posterior, x)(d).log_weights.numpy()
    expected = array_stats.psislw(-raw, axis=0)[0].T
    np.testing.assert_allclose(smoothed - logsumexp(smoothed, 0), expected, rtol=1e-8)
    least = raw.argmin(0)
    np.testing.assert_allclose(smoothed[least, [0, 1]], raw[least, [0, 1]], rtol=1e-12)
    both = Reweight(smooth=True, normalise=True)(posterior, x)(d).log_weights.numpy()
    np.testing.assert_allclose(both, expected, rtol=1e-8)


VARIANTS = [
    Reweight(),
    Reweight(SelfNormalised()),
    Reweight(normalise=True),
    Reweight(smooth=True),
    Reweight(smooth=True, normalise=True),
]


def statistics(likelihood, ensemble):
    found = [likelihood.mean, likelihood.variance, likelihood.entropy, likelihood.aleatoric]
    return [statistic(ensemble) for statistic in found]


@pytest.mark.parametrize(("likelihood", "outputs"), LIKELIHOODS)
@pytest.mark.parametrize("adjust", VARIANTS)
@pytest.mark.parametrize("draws", [7, 50])
def test_distance_zero_gives_back_the_base_posterior(adjust, likelihood, outputs, draws):
    posterior, x = network_posterior(likelihood, outputs, draws=draws), inputs(50)
    base = base_ensemble(likelihood, posterior.outputs(x))
    adjusted = adjust(posterior, x)
    distances = torch.linspace(0, 3, 50, dtype=torch.float64)
    distances[25:] = 0
    for d, rows in ((torch.zeros(50), slice(None)), (distances, slice(25, None)), (distances.roll(25), slice(25))):
        ensemble = adjusted(d)
        assert torch.equal(ensemble.log_weights[:, rows], base.log_weights[:, rows])
        for ours, theirs in zip(statistics(likelihood, ensemble), statistics(likelihood, base), strict=True):
            assert torch.equal(ours[rows], theirs[rows])


@pytest.mark.parametrize(("likelihood", "outputs"), LIKELIHOODS[:2])
def test_distance_zero_of_complete_gives_back_the_base_prediction(likelihood, outputs):
    """The uniform answer is one more draw of weight zero."""
    posterior, x = network_posterior(likelihood, outputs), inputs(5)
    ensemble = Reweight(complete=True)(posterior, x)(torch.zeros(5))
    base = base_ensemble(likelihood, posterior.outputs(x))
    assert torch.equal(ensemble.log_weights[:-1], base.log_weights)
    assert (ensemble.log_weights[-1] == -math.inf).all()
    for ours, theirs in zip(statistics(likelihood, ensemble), statistics(likelihood, base), strict=True):
        assert torch.equal(ours, theirs)


def test_every_input_has_its_own_distance():
    posterior, x = network_posterior(Categorical(), 3), inputs(40)
    distances = torch.logspace(-3, 2, 40, dtype=torch.float64)
    together = Reweight()(posterior, x)(distances).log_weights
    for n in (0, 17, 39):
        alone = Reweight()(posterior, x[n : n + 1])(distances[n : n + 1]).log_weights
        torch.testing.assert_close(alone[:, 0], together[:, n], rtol=1e-10, atol=1e-10)


def test_normalise_and_complete_exclude_each_other():
    with pytest.raises(ValueError, match="not both"):
        Reweight(normalise=True, complete=True)


@pytest.mark.parametrize(("likelihood", "outputs"), LIKELIHOODS[2:])
def test_complete_is_for_classification(likelihood, outputs):
    with pytest.raises(ValueError, match="only classification"):
        Reweight(complete=True)(network_posterior(likelihood, outputs), inputs(2))


def test_missing_prior_is_refused_and_can_be_given():
    models = [nn.Linear(2, 3) for _ in range(4)]
    posterior = samples.from_state_dicts(models[0], Categorical(), [m.state_dict() for m in models])
    for adjust in (Reweight(), Reweight(SelfNormalised()), Reweight(PriorMonteCarlo(X, Y))):
        with pytest.raises(ValueError, match="prior scale"):
            adjust(posterior, inputs(2))
    with pytest.raises(ValueError, match="no moments"):
        Reweight()(posterior.with_prior(1.0), inputs(2))
    ensemble = Reweight(SelfNormalised())(posterior.with_prior(1.0), inputs(2))(doubles([0.0, 1.0]))
    assert ensemble.log_weights.isfinite().all()


def test_predictions_alone_are_refused():
    posterior = StackedPredictions(lambda x: torch.randn(5, len(x), 3), Categorical())
    with pytest.raises(ValueError, match="parameter draws"):
        Reweight(SelfNormalised())(posterior, inputs(2))
    with pytest.raises(ValueError, match="PriorMonteCarlo"):
        PriorMonteCarlo(X, Y)(posterior)
    with pytest.raises(ValueError, match="no moments"):
        ClosedForm()(posterior)


def test_moments_without_a_prior_are_refused():
    with pytest.raises(ValueError, match="no prior"):
        ClosedForm()(replace(network_posterior(Categorical(), 3), prior=None))


def test_single_network_is_refused():
    with pytest.raises(ValueError, match="single network"):
        Reweight(SelfNormalised())(map.point(nn.Linear(2, 3), Categorical()), inputs(2))
