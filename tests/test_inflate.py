"""Inflate: tempering and moments by hand."""

import math
import warnings

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import softmax
from torch import nn

import dapcal
from dapcal.adjust import Inflate, OfTrainingTargets
from dapcal.ensembles import base_ensemble
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian, NoiseHead
from dapcal.posteriors import gaussian, laplace, map
from dapcal.posteriors.predictions import StackedPredictions

LIKELIHOODS = [(Categorical(), 3), (Categorical(1.7), 2), (Bernoulli(), 1), (Gaussian(0.3), 2), (NoiseHead(), 4)]
INPUTS = 6
X = torch.zeros(INPUTS, 1)  # the stacked predictions below do not look at them


def stacked(likelihood, outputs, draws=12, dtype=torch.float64, seed=0):
    """A posterior whose outputs are fixed random numbers, and those numbers (S, N, C)."""
    generator = torch.Generator().manual_seed(seed)
    values = 2 * torch.randn(1, INPUTS, outputs, generator=generator, dtype=dtype)
    values = values + torch.randn(draws, INPUTS, outputs, generator=generator, dtype=dtype)
    return StackedPredictions(lambda x: values, likelihood), values


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def tempered(logits, k):
    """softmax(log p̄ / t) with t = √(1 + π/8 · V (k² − 1)), V the class-averaged variance of the centred logits."""
    p = softmax(logits, -1).mean(0)
    centred = logits - logits.mean(-1, keepdims=True)
    v = ((centred - centred.mean(0)) ** 2).mean((0, 2))
    t = np.sqrt(1 + np.pi / 8 * v * (k**2 - 1))
    return softmax(np.log(p) / t[:, None], -1)


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("d", [0.0, 0.1, 1.0, 30.0])
def test_categorical_by_hand(classes, temperature, d):
    likelihood = Categorical(temperature)
    posterior, values = stacked(likelihood, classes)
    got = likelihood.mean(Inflate()(posterior, X)(torch.full((INPUTS,), d)))
    k = 1 + float(torch.tensor(d))
    np.testing.assert_allclose(got, tempered(values.numpy() / temperature, k), rtol=1e-10)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("d", [0.0, 0.1, 1.0, 30.0])
def test_bernoulli_is_two_classes_with_logits_zero_and_z(temperature, d):
    likelihood = Bernoulli(temperature)
    posterior, values = stacked(likelihood, 1)
    got = likelihood.mean(Inflate()(posterior, X)(torch.full((INPUTS,), d)))
    z = values.numpy() / temperature
    k = 1 + float(torch.tensor(d))
    np.testing.assert_allclose(got, tempered(np.concatenate([np.zeros_like(z), z], -1), k), rtol=1e-10)


@pytest.mark.parametrize(("likelihood", "outputs"), [(Categorical(), 2), (Categorical(), 7), (Bernoulli(), 1)])
def test_confidence_falls_to_chance_and_the_class_stays(likelihood, outputs):
    posterior, _ = stacked(likelihood, outputs)
    adjusted = Inflate()(posterior, X)
    distances = [0.0, 1e-3, 0.1, 0.5, 2.0, 10.0, 1e3, 1e7]
    curve = torch.stack([likelihood.mean(adjusted(torch.full((INPUTS,), d))) for d in distances])  # (D, N, K)
    assert (curve.max(-1).values.diff(dim=0) < 0).all()
    assert (curve.argmax(-1) == curve[0].argmax(-1)).all()
    torch.testing.assert_close(curve[-1], torch.full_like(curve[-1], 1 / curve.shape[-1]), rtol=1e-5, atol=0)
    torch.testing.assert_close(curve.sum(-1), torch.ones_like(curve[..., 0]))
    entropy = torch.stack([likelihood.entropy(adjusted(torch.full((INPUTS,), d))) for d in distances])
    assert (entropy.diff(dim=0) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_input_has_its_own_distance(dtype):
    likelihood = Categorical()
    posterior, values = stacked(likelihood, 4, dtype=dtype)
    d = torch.linspace(0, 5, INPUTS)
    expected = tempered(values.double().numpy(), 1 + d.double().numpy())
    np.testing.assert_allclose(likelihood.mean(Inflate()(posterior, X)(d)), expected, rtol=1e-6)


@pytest.mark.parametrize("targets", [1, 3])
def test_regression_has_mean_and_inflated_variance(targets):
    likelihood = Gaussian(0.7)
    posterior, values = stacked(likelihood, targets)
    d = torch.linspace(0, 9, INPUTS, dtype=torch.float64)
    ensemble = Inflate()(posterior, X)(d)
    k = 1 + d.numpy()[:, None]
    mean, variance = values.numpy().mean(0), 0.7**2 + k**2 * values.numpy().var(0)
    np.testing.assert_allclose(likelihood.mean(ensemble), mean, rtol=1e-12)
    np.testing.assert_allclose(likelihood.variance(ensemble), variance, rtol=1e-12)
    y = torch.ones(INPUTS, targets, dtype=torch.float64)
    expected = stats.norm.logpdf(1, mean, np.sqrt(variance)).sum(-1)
    np.testing.assert_allclose(likelihood.log_prob(ensemble, y), expected, rtol=1e-10)


def test_noise_head_inflates_locations_alone():
    likelihood = NoiseHead(factor=1.3, floor=0.01)
    posterior, values = stacked(likelihood, 4)
    d = torch.linspace(0, 9, INPUTS, dtype=torch.float64)
    location, raw = values.numpy()[..., :2], values.numpy()[..., 2:]
    noise = 1.3 * (np.logaddexp(0, raw) + 0.01)
    ensemble = Inflate()(posterior, X)(d)
    k = 1 + d.numpy()[:, None]
    np.testing.assert_allclose(likelihood.mean(ensemble), location.mean(0), rtol=1e-12)
    np.testing.assert_allclose(likelihood.variance(ensemble), (noise**2).mean(0) + k**2 * location.var(0), rtol=1e-10)
    np.testing.assert_allclose(likelihood.aleatoric(ensemble), (noise**2).mean(0), rtol=1e-12)
    drawn = Inflate(drawn=True)(posterior, X)(d).outputs
    assert torch.equal(drawn[..., 2:], values[..., 2:])
    assert not torch.equal(drawn[..., :2], values[..., :2])


@pytest.mark.parametrize(("likelihood", "outputs"), LIKELIHOODS[3:])
def test_drawn_form_has_the_same_moments_in_regression(likelihood, outputs):
    posterior, _ = stacked(likelihood, outputs)
    d = torch.linspace(0, 9, INPUTS, dtype=torch.float64)
    closed, drawn = (Inflate(drawn)(posterior, X)(d) for drawn in (False, True))
    torch.testing.assert_close(likelihood.mean(drawn), likelihood.mean(closed))
    torch.testing.assert_close(likelihood.variance(drawn), likelihood.variance(closed))
    assert not drawn.spread.any()


@pytest.mark.parametrize("outputs", [1, 5])
def test_drawn_form_pushes_draws_from_their_mean(outputs):
    likelihood = Bernoulli() if outputs == 1 else Categorical()
    posterior, values = stacked(likelihood, outputs)
    d = torch.linspace(0, 3, INPUTS, dtype=torch.float64)
    pushed = values.mean(0) + (1 + d)[:, None] * (values - values.mean(0))
    got = Inflate(drawn=True)(posterior, X)(d)
    torch.testing.assert_close(got.outputs, pushed)
    logits = pushed if outputs > 1 else torch.cat([torch.zeros_like(pushed), pushed], -1)
    np.testing.assert_allclose(likelihood.mean(got), softmax(logits.numpy(), -1).mean(0), rtol=1e-9)


@pytest.mark.parametrize(("likelihood", "outputs"), LIKELIHOODS)
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distance_zero_gives_back_the_base_posterior(likelihood, outputs, drawn, dtype):
    posterior, values = stacked(likelihood, outputs, dtype=dtype)
    base = base_ensemble(likelihood, values)
    adjusted = Inflate(drawn)(posterior, X)
    mixed = doubles([0.0, 0.3, 0.0, 5.0, 0.0, 1e4])
    for d, rows in ((torch.zeros(INPUTS), slice(None)), (mixed, slice(0, None, 2))):
        ensemble = adjusted(d)
        assert torch.equal(ensemble.outputs[:, rows], base.outputs[:, rows])
        assert torch.equal(ensemble.log_weights, base.log_weights)
        assert not ensemble.spread[rows].any()
        for statistic in (likelihood.mean, likelihood.variance, likelihood.entropy, likelihood.aleatoric):
            assert torch.equal(statistic(ensemble)[rows], statistic(base)[rows])
    assert not torch.equal(likelihood.variance(adjusted(mixed))[1::2], likelihood.variance(base)[1::2])


@pytest.mark.parametrize(
    ("prior", "lead"),
    [
        ({}, 1.0),
        ({"prior_scale": 0.25}, 4.0),
        ({"prior_scale": {"weight": 0.5, "bias": 2.0}}, 2.0),
        ({"prior_scale": {"weight": 0.5, "bias": 2.0}, "aware": {"weight": 1.0, "bias": 6.0}}, 3.0),
        ({"prior_scale": {"weight": 0.5, "bias": 2.0}, "aware": "bias"}, 0.5),
    ],
)
def test_k_comes_from_the_largest_factor_over_sigma0(prior, lead):
    model = nn.Linear(2, 1)
    deviations = {n: torch.full_like(p, 0.2) for n, p in model.named_parameters()}
    posterior = gaussian.diagonal(model, Gaussian(0.5), deviations, draws=9, **prior)
    x, d = torch.randn(3, 2, generator=torch.Generator().manual_seed(0)), doubles([0.1, 1.0, 4.0])
    variance = posterior.outputs(x).double().numpy().var(0)
    expected = 0.25 + (1 + lead * d.numpy()[:, None]) ** 2 * variance
    np.testing.assert_allclose(Gaussian(0.5).variance(Inflate()(posterior, x)(d)), expected, rtol=1e-6)


def test_an_input_without_spread_beside_others_stays():
    likelihood = Categorical()
    _, values = stacked(likelihood, 3)
    values[:, 2] = values[0, 2]
    base = likelihood.mean(base_ensemble(likelihood, values))
    got = likelihood.mean(Inflate()(StackedPredictions(lambda x: values, likelihood), X)(torch.full((INPUTS,), 5.0)))
    torch.testing.assert_close(got[2], base[2], rtol=1e-12, atol=0)
    assert got[0].max() < base[0].max()


def test_single_networks_are_refused():
    one = StackedPredictions(lambda x: torch.randn(1, len(x), 3), Categorical())
    for posterior in (one, map.point(nn.Linear(1, 3), Categorical())):
        with pytest.raises(ValueError, match=r"single network.*variational"):
            Inflate()(posterior, X)


def test_huge_distances_stay_finite():
    for likelihood, outputs in LIKELIHOODS:
        posterior, _ = stacked(likelihood, outputs)
        ensemble = Inflate()(posterior, X)(torch.full((INPUTS,), 1e100, dtype=torch.float64))
        assert likelihood.mean(ensemble).isfinite().all()
        assert likelihood.variance(ensemble).isfinite().all()
        assert math.isfinite(likelihood.entropy(ensemble).sum())


def test_the_variance_stops_at_that_of_the_training_targets_around_the_prediction():
    """E[(y − f̄)²] over the targets, input by input; a base variance above it is left alone."""
    generator = torch.Generator().manual_seed(0)
    y = 2 + 3 * torch.randn(500, 1, generator=generator).double()
    outputs = torch.randn(20, 4, 1, generator=generator).double() * torch.tensor([0.1, 1.0, 2.0, 30.0])[:, None]
    posterior = StackedPredictions(lambda x: outputs, Gaussian(0.5))
    free, limited = (
        Inflate(limit=limit)(posterior, torch.zeros(4, 1)) for limit in (None, Gaussian().unconditional(y))
    )
    likelihood = posterior.likelihood
    around = ((y - outputs.mean(0).T) ** 2).mean(0)[:, None]  # (N, 1), by brute force
    for d in (0.0, 0.3, 5.0, 1e6):
        distance = torch.full((4,), d).double()
        want = likelihood.variance(free(distance)).clamp_max(
            torch.maximum(around, likelihood.variance(free(0 * distance)))
        )
        torch.testing.assert_close(likelihood.variance(limited(distance)), want)
    assert torch.equal(limited(torch.zeros(4)).spread, free(torch.zeros(4)).spread)


def test_the_limit_may_be_the_targets_own_spread_wherever_the_prediction_lies():
    generator = torch.Generator().manual_seed(0)
    y = 2 + 3 * torch.randn(500, 1, generator=generator).double()
    outputs = torch.tensor([0.0, 50.0])[:, None] + torch.randn(20, 2, 1, generator=generator).double()
    posterior = StackedPredictions(lambda x: outputs, Gaussian(0.5))
    adjust = Inflate(limit=OfTrainingTargets(own_spread=True)).fitted(posterior.likelihood, y)
    found = posterior.likelihood.variance(adjust(posterior, torch.zeros(2, 1))(torch.full((2,), 1e6).double()))
    torch.testing.assert_close(found, y.var(0, correction=0).expand(2, 1))


def test_regression_has_the_limit_by_default_and_keeps_it_in_a_file(tmp_path):
    x = torch.linspace(-1, 1, 80)[:, None]
    data = (x, torch.sin(3 * x))
    posterior = laplace.fit(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)), Gaussian(0.3), data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calibrated = dapcal.calibrate(posterior, train=(x[::2], data[1][::2]), held_out=(x[1::2] + 0.01, data[1][1::2]))
        free = dapcal.calibrate(
            posterior,
            train=(x[::2], data[1][::2]),
            held_out=(x[1::2] + 0.01, data[1][1::2]),
            adjust=Inflate(limit=None),
        )
    assert calibrated.adjust.limit == Gaussian().unconditional(data[1][::2])
    assert free.adjust.limit is None
    far = torch.tensor([[1e4]])
    around = ((data[1][::2] - calibrated(far).mean) ** 2).mean()
    assert calibrated(far).variance <= torch.maximum(around, calibrated(far).base.variance) * 1.0001
    calibrated.save(tmp_path / "limit.dap")
    again = dapcal.load(tmp_path / "limit.dap", posterior.model)
    assert torch.equal(again(far).variance, calibrated(far).variance)


@pytest.mark.parametrize("task", ["classes", "targets"])
@pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")
def test_the_default_is_what_it_is_called(task, posterior, blobs):
    """calibrate(adjust=None) and calibrate(adjust=Inflate()) are the same, to the last digit."""
    train, held_out = blobs
    if task == "targets":
        network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        scale = {name: torch.full_like(p, 0.1) for name, p in network.named_parameters()}
        posterior = gaussian.diagonal(network, Gaussian(0.3), scale, draws=10)
        train, held_out = ((x, x.sum(1, keepdim=True)) for x, _ in blobs)
    one, two = (dapcal.calibrate(posterior, train=train, held_out=held_out, adjust=a) for a in (None, Inflate()))
    assert one.phi == two.phi
    assert one.adjust == two.adjust
    assert one.adjust.limited == (task == "targets")
    x = torch.linspace(-9, 9, 20).reshape(10, 2)
    assert torch.equal(one(x).mean, two(x).mean)
    assert torch.equal(one(x).variance, two(x).variance)
    unlimited = dapcal.calibrate(posterior, train=train, held_out=held_out, adjust=Inflate(limit=None))
    assert unlimited.adjust.limit is None
