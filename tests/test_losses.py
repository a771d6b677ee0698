"""Calibration losses by hand, and against exact evidences of a conjugate model."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from scipy.special import softmax
from torch import nn

from dapcal.adjust import Inflate, Transport
from dapcal.calibration.losses import EmpiricalBayes, LogMarginal, LogPredictive, Problem, Target
from dapcal.data import Labelled
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian, NoiseHead
from dapcal.posteriors import gaussian, samples
from dapcal.posteriors.predictions import StackedPredictions

FACTORS = [0.0, 0.5, 3.0]


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def problem_of(posterior, x, pre_distance, y=None, train=None, adjust=None):
    """A problem without spaces, which the losses here do not look at."""
    adjust = adjust or Inflate()
    train = Labelled(x, torch.zeros(len(x))) if train is None else train
    return Problem(posterior, x, y, pre_distance, adjust(posterior, x), train, adjust, ())


def linear_predictions(likelihood, outputs, draws=8, features=2):
    """Stacked predictions of fixed linear maps, and the function itself."""
    weights = torch.randn(draws, features, outputs, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def function(x):
        return torch.einsum("nf,sfc->snc", x, weights)

    return StackedPredictions(function, likelihood), function


def inputs(n, seed=1):
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tempered(logits, k):
    centred = logits - logits.mean(-1, keepdims=True)
    t = np.sqrt(1 + np.pi / 8 * centred.var(0).mean(-1) * (k**2 - 1))
    return softmax(np.log(softmax(logits, -1).mean(0)) / t[:, None], -1)


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("factor", FACTORS)
def test_target_in_classification(classes, factor):
    posterior, function = linear_predictions(Categorical(), classes)
    x, d0 = inputs(7), torch.linspace(0.0, 2.0, 7, dtype=torch.float64)
    p = tempered(function(x).numpy(), 1 + factor * d0.numpy())
    got = Target()(problem_of(posterior, x, d0))(factor)
    np.testing.assert_allclose(got, ((p - 1 / classes) ** 2).sum(-1), rtol=1e-9)
    got = Target(gamma=0.1)(problem_of(posterior, x, d0))(factor)
    np.testing.assert_allclose(got, ((p - 0.1) ** 2).sum(-1), rtol=1e-9)
    gamma = tuple(np.arange(1, classes + 1) / 10)
    got = Target(gamma=gamma)(problem_of(posterior, x, d0))(factor)
    np.testing.assert_allclose(got, ((p - gamma) ** 2).sum(-1), rtol=1e-9)


def test_target_of_two_classes_is_one_half():
    posterior, _ = linear_predictions(Bernoulli(), 1)
    x, d0 = inputs(4), doubles([0.1, 1.0, 2.0, 3.0])
    problem = problem_of(posterior, x, d0)
    p = Bernoulli().mean(problem.adjusted(2 * d0)).numpy()[:, 1]
    np.testing.assert_allclose(Target()(problem)(2.0), 2 * (p - 0.5) ** 2, rtol=1e-9)


@pytest.mark.parametrize("targets", [1, 2])
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("noise_head", [False, True])
def test_target_in_regression(targets, factor, noise_head):
    """U = k² V, γ = 10 times the 95 % quantile of V at the training inputs, per target."""
    likelihood = NoiseHead() if noise_head else Gaussian(0.4)
    posterior, function = linear_predictions(likelihood, targets * (1 + noise_head))
    x, d0, train = inputs(7), torch.linspace(0, 2, 7, dtype=torch.float64), inputs(90, seed=2)
    epistemic = (1 + factor * d0.numpy()[:, None]) ** 2 * function(x).numpy()[..., :targets].var(0)
    quantile = np.quantile(function(train).numpy()[..., :targets].var(0), 0.95, axis=0)
    problem = problem_of(posterior, x, d0, train=Labelled(train, torch.zeros(90)))
    for loss, gamma in ((Target(), 10 * quantile), (Target(times=3.0), 3 * quantile), (Target(gamma=0.7), 0.7)):
        np.testing.assert_allclose(loss(problem)(factor), ((epistemic - gamma) ** 2).sum(-1), rtol=1e-9)


@pytest.mark.parametrize(("noise", "taken"), [(0.1, 0.4**2 - 0.1**2), (0.7, 0.0)])
def test_target_in_regression_counts_what_was_taken_in_the_domain(noise, taken):
    """γ is that of the posterior as it was given, and the noise variance that scaling took away comes on top."""
    given, function = linear_predictions(Gaussian(0.4), 2)
    narrowed = StackedPredictions(lambda x: 0.3 * function(x), Gaussian(noise))
    x, d0, train = inputs(7), torch.linspace(0, 2, 7, dtype=torch.float64), inputs(90, seed=2)
    problem = problem_of(narrowed, x, d0, train=Labelled(train, torch.zeros(90)))._replace(given=given)
    epistemic = (1 + 1.5 * d0.numpy()[:, None]) ** 2 * 0.09 * function(x).numpy().var(0)
    gamma = 10 * np.quantile(function(train).numpy().var(0), 0.95, axis=0) + taken
    np.testing.assert_allclose(Target()(problem)(1.5), ((epistemic - gamma) ** 2).sum(-1), rtol=1e-9)


def test_target_around_a_plain_network_is_the_variance_of_the_training_targets():
    posterior, function = linear_predictions(Gaussian(0.4), 2)
    x, d0, y = inputs(7), torch.linspace(0, 2, 7, dtype=torch.float64), inputs(90, seed=2)
    problem = problem_of(posterior, x, d0, train=Labelled(inputs(90, seed=3), y))._replace(around_network=True)
    epistemic = (1 + 1.5 * d0.numpy()[:, None]) ** 2 * function(x).numpy().var(0)
    np.testing.assert_allclose(Target()(problem)(1.5), ((epistemic - y.numpy().var(0)) ** 2).sum(-1), rtol=1e-9)


def test_target_counts_training_inputs_in_batches():
    posterior, function = linear_predictions(Gaussian(0.4), 1)
    train, x, d0 = inputs(5000, seed=2), inputs(1), doubles([0.0])
    gamma = 10 * np.quantile(function(train).numpy().var(0), 0.95)
    problem = problem_of(posterior, x, d0, train=Labelled(train, torch.zeros(5000)))
    expected = (function(x).numpy().var(0).item() - gamma) ** 2
    assert Target()(problem)(1.0).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("factor", FACTORS)
def test_log_predictive(factor):
    x, d0 = inputs(6), torch.linspace(0, 2, 6, dtype=torch.float64)
    k = 1 + factor * d0.numpy()
    posterior, function = linear_predictions(Categorical(), 3)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    got = LogPredictive()(problem_of(posterior, x, d0, y=labels))(factor)
    p = tempered(function(x).numpy(), k)
    np.testing.assert_allclose(got, -np.log(p[np.arange(6), labels.numpy()]), rtol=1e-9)
    posterior, function = linear_predictions(Gaussian(0.4), 2)
    f, y = function(x).numpy(), inputs(6, seed=9)
    got = LogPredictive()(problem_of(posterior, x, d0, y=y))(factor)
    scale = np.sqrt(0.4**2 + k[:, None] ** 2 * f.var(0))
    np.testing.assert_allclose(got, -stats.norm.logpdf(y.numpy(), f.mean(0), scale).sum(-1), rtol=1e-9)


def one_weight(likelihood, dtype=torch.float64, mean=0.3, sigma=0.2, **prior):
    """y = weight · x."""
    model = nn.Linear(1, 1, bias=False).to(dtype)
    moments = {"weight": torch.tensor([[sigma]], dtype=dtype)}, {"weight": torch.tensor([[mean]], dtype=dtype)}
    return gaussian.diagonal(model, likelihood, moments[0], mean=moments[1], **prior)


def estimate_with_error(posterior, x, y, d0, factor, draws, seeds=8):
    """LogMarginal's mean over seeds and its standard error."""
    runs = []
    for seed in range(seeds):
        problem = problem_of(posterior, x, d0, y=y)
        runs.append(LogMarginal(draws=draws, seed=seed)(problem)(factor).numpy())
    return np.mean(runs, 0), np.std(runs, 0, ddof=1) / math.sqrt(seeds)


GRID = 0.1**2 / 4  # linear interpolation between levels 0.1 apart moves a standard deviation by 0.1²/8 at most


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sigma0", [0.1, 0.9])
@pytest.mark.parametrize("relative", [0.0, 0.3, 4.0, 300.0, 2e4])
def test_log_marginal_of_the_conjugate_model(relative, sigma0, dtype):
    """−log N(y | 0, x² (σ0 + d)² + noise²)."""
    factor, noise = relative * sigma0, 0.5 * sigma0 * (1 + relative)  # noise that few draws resolve
    x, y = torch.tensor([[0.7], [-1.5], [2.0]], dtype=dtype), noise * torch.tensor([[0.9], [0.2], [-2.5]], dtype=dtype)
    posterior = one_weight(Gaussian(noise), dtype, prior_scale=sigma0)
    d0 = torch.tensor([1.0, 0.5, 1.5], dtype=torch.float64)
    got, error = estimate_with_error(posterior, x, y, d0, factor, 2000)
    scale = np.sqrt(x.numpy()[:, 0] ** 2 * (sigma0 + factor * d0.numpy()) ** 2 + noise**2)
    assert error.max() < 0.03
    assert (np.abs(got + stats.norm.logpdf(y.numpy()[:, 0], 0, scale)) < 4 * error + GRID).all()


def test_log_marginal_of_a_classifier_against_quadrature():
    posterior = one_weight(Bernoulli(), prior_scale=0.8)
    x, y, d = doubles([[1.5], [-2.0]]), torch.tensor([1, 0]), 2.0

    def density(theta, n):
        p = 1 / (1 + math.exp(-theta * x[n].item()))
        return (p if y[n] == 1 else 1 - p) * stats.norm.pdf(theta, 0, 0.8 + d)

    expected = [-math.log(integrate.quad(density, -25, 25, args=(n,))[0]) for n in range(2)]
    got, error = estimate_with_error(posterior, x, y, doubles([1.0, 1.0]), d, 2000)
    assert error.max() < 0.02
    assert (np.abs(got - expected) < 4 * error + GRID).all()


# training data of the conjugate model
TRAIN_X, TRAIN_Y, NOISE = np.array([-1.0, -0.3, 0.4, 0.9, 1.3]), np.array([-0.9, 0.1, 0.5, 0.2, 1.0]), 0.6


def log_evidence(design, scales):
    """log N(y | 0, Σ_i scales_i² design_i design_iᵀ + noise² I)."""
    covariance = (design * np.square(scales)) @ design.T + NOISE**2 * np.eye(len(TRAIN_Y))
    return stats.multivariate_normal(np.zeros(len(TRAIN_Y)), covariance).logpdf(TRAIN_Y)


@pytest.mark.parametrize("factor", [0.0, 0.05, 0.7, 6.0])
def test_empirical_bayes_is_the_ratio_of_evidences(factor):
    sigma0, design = 0.9, TRAIN_X[:, None]
    variance = 1 / (1 / sigma0**2 + (TRAIN_X**2).sum() / NOISE**2)
    mean = variance * (TRAIN_X * TRAIN_Y).sum() / NOISE**2
    posterior = one_weight(Gaussian(NOISE), mean=mean, sigma=math.sqrt(variance), prior_scale=sigma0)
    d0 = doubles([0.0, 0.4, 1.0])
    got = EmpiricalBayes()(problem_of(posterior, torch.zeros(3, 1, dtype=torch.float64) + 1, d0))(factor)
    base = log_evidence(design, [sigma0])
    expected = [base - log_evidence(design, [sigma0 + factor * d]) for d in d0.tolist()]
    np.testing.assert_allclose(got, expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("aware", [{"weight": 1.0, "bias": 1.0}, {"weight": 1.0}, {"weight": 0.5, "bias": 2.0}])
def test_empirical_bayes_of_two_groups(aware):
    """y = weight · (x, x²) + bias."""
    scales, design = np.array([0.7, 0.7, 1.6]), np.stack([TRAIN_X, TRAIN_X**2, np.ones(5)], 1)
    covariance = np.linalg.inv(design.T @ design / NOISE**2 + np.diag(1 / scales**2))
    mean = covariance @ design.T @ TRAIN_Y / NOISE**2
    posterior = gaussian.full(
        nn.Linear(2, 1).double(),
        Gaussian(NOISE),
        torch.tensor(covariance),
        ["weight", "bias"],
        mean={"weight": doubles([mean[:2].tolist()]), "bias": doubles([mean[2]])},
        prior_scale={"weight": 0.7, "bias": 1.6},
        aware=aware,
    )
    d0, widened = doubles([0.2, 1.0]), np.array([aware["weight"], aware["weight"], aware.get("bias", 0)])
    got = EmpiricalBayes()(problem_of(posterior, inputs(2), d0))(1.5)
    base = log_evidence(design, scales)
    expected = [base - log_evidence(design, scales + widened * 1.5 * d) for d in d0.tolist()]
    np.testing.assert_allclose(got, expected, rtol=1e-8)


@pytest.mark.parametrize("loss", [LogPredictive(), LogMarginal()])
def test_missing_labels_are_refused(loss):
    posterior = one_weight(Gaussian(0.5))
    with pytest.raises(ValueError, match=rf"{type(loss).__name__} needs targets.*Target\(\)"):
        loss(problem_of(posterior, doubles([[1.0]]), doubles([1.0])))


def test_losses_without_labels_do_not_ask_for_them():
    posterior = one_weight(Gaussian(0.5))
    for loss in (Target(), EmpiricalBayes()):
        assert loss(problem_of(posterior, doubles([[1.0]]), doubles([1.0])))(0.5).shape == (1,)


def test_log_marginal_needs_a_network_and_a_prior():
    stacked, _ = linear_predictions(Gaussian(0.5), 1)
    with pytest.raises(ValueError, match="LogMarginal needs a posterior over a network"):
        LogMarginal()(problem_of(stacked, inputs(1), doubles([1.0]), y=doubles([[0.0]])))
    priorless = replace(one_weight(Gaussian(0.5)), prior=None)
    with pytest.raises(ValueError, match="with_prior"):
        LogMarginal()(problem_of(priorless, doubles([[1.0]]), doubles([1.0]), y=doubles([[0.0]])))


def test_empirical_bayes_needs_moments():
    models = [nn.Linear(2, 1).double() for _ in range(3)]
    states = [m.state_dict() for m in models]
    brought = samples.from_state_dicts(models[0], Gaussian(0.5), states, prior_scale=1.0)
    with pytest.raises(ValueError, match="no moments"):
        EmpiricalBayes()(problem_of(brought, inputs(1), doubles([1.0])))


def test_a_loss_looks_at_the_adjustment_it_is_given():
    """Log predictive through Transport: N(y | μ x, noise² + x² σ_d²) up to the draws' own moments."""
    posterior = one_weight(Gaussian(0.5), draws=5000)
    x, y, d0 = doubles([[2.0]]), doubles([[0.3]]), doubles([1.0])
    got = LogPredictive()(problem_of(posterior, x, d0, y=y, adjust=Transport(step=None)))(3.0).item()
    theta = posterior.draws[:, 0].numpy()
    variance = 4 * theta.var() / (1 - (1 - 1 / 16) * 0.2**2)
    mean = 2 * (0.3 + (theta.mean() - 0.3) / math.sqrt(1 - (1 - 1 / 16) * 0.2**2))
    assert got == pytest.approx(-stats.norm.logpdf(0.3, mean, math.sqrt(0.25 + variance)), rel=1e-9)
