"""Revert: moments by hand, limits, units, and what is refused."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import dapcal
from dapcal.adjust import Inflate, Revert
from dapcal.ensembles import base_ensemble, closed_ensemble
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian, NoiseHead, Unconditional
from dapcal.posteriors import ensemble, gaussian, laplace, map
from dapcal.posteriors.predictions import StackedPredictions

INPUTS = 6
X = torch.zeros(INPUTS, 1)  # the stacked predictions below do not look at them
CENTER, TOTAL = (3.0, -1.0), (4.0, 0.5)
TARGETS = Unconditional(CENTER, TOTAL)
LIKELIHOODS = [(Gaussian(0.3), 2), (NoiseHead(factor=1.3, floor=0.01), 4)]
GROWING = (0.0, 1e-6, 1e-3, 0.1, 0.5, 1.0, 3.0, 30.0, 1e3, 1e6, 1e9)

both = pytest.mark.parametrize(("likelihood", "outputs"), LIKELIHOODS)


def stacked(likelihood, outputs, draws=12, dtype=torch.float64, factor=1.0):
    """A posterior whose outputs are fixed random numbers, and those numbers (S, N, C)."""
    generator = torch.Generator().manual_seed(0)
    values = 2 * torch.randn(1, INPUTS, outputs, generator=generator, dtype=dtype)
    values = values + factor * torch.randn(draws, INPUTS, outputs, generator=generator, dtype=dtype)
    return StackedPredictions(lambda x: values, likelihood), values


def locations_and_noise(likelihood, values):
    """Of each draw, by numpy: locations (S, N, 2), noise variances (S, N, 2)."""
    values = values.double().numpy()
    if isinstance(likelihood, Gaussian):
        return values, np.full_like(values, likelihood.noise**2)
    raw = values[..., 2:]
    return values[..., :2], (likelihood.factor * (np.logaddexp(0, raw) + likelihood.floor)) ** 2


def by_hand(likelihood, values, d, center=CENTER, total=TOTAL):
    """Mean and variance (N, 2), straight from the formula."""
    location, noise = locations_and_noise(likelihood, values)
    noise, v, f = noise.mean(0), location.var(0), location.mean(0)
    s = np.maximum(np.array(total) - noise, 0.01 * np.array(total))
    e = ((1 + d) ** 2 - 1)[:, None] * v
    w = s / (s + e)
    return center + w * (f - center), noise + v + w * e


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_by_hand(likelihood, outputs, dtype):
    posterior, values = stacked(likelihood, outputs, dtype=dtype)
    d = torch.linspace(0, 9, INPUTS, dtype=torch.float64)
    found = Revert(TARGETS)(posterior, X)(d)
    mean, variance = by_hand(likelihood, values, d.numpy())
    np.testing.assert_allclose(likelihood.mean(found), mean, rtol=1e-12)  # float64, whatever the outputs are
    np.testing.assert_allclose(likelihood.variance(found), variance, rtol=1e-12)
    assert found.outputs.dtype == dtype
    location, _ = locations_and_noise(likelihood, found.outputs)
    np.testing.assert_allclose(location.mean(0), mean, rtol=1e-5 if dtype == torch.float32 else 1e-12)
    assert torch.equal(found.outputs[..., 2:], values[..., 2:])  # raw noises
    y = torch.ones(INPUTS, 2, dtype=torch.float64)
    expected = stats.norm.logpdf(1, mean, np.sqrt(variance)).sum(-1)
    np.testing.assert_allclose(likelihood.log_prob(found, y), expected, rtol=1e-10)


def test_it_is_a_gaussian_prior_measured_by_the_network():
    """w, mean and variance are those of the conjugate update: prior N(ȳ, S), one measurement f̄ of variance E."""
    posterior, values = stacked(Gaussian(0.3), 2)
    found = Revert(TARGETS)(posterior, X)(torch.full((INPUTS,), 0.7, dtype=torch.float64))
    s, e = torch.tensor(TOTAL) - 0.09, (1.7**2 - 1) * values.var(0, correction=0)
    precision = 1 / s + 1 / e
    torch.testing.assert_close(
        Gaussian().mean(found), (torch.tensor(CENTER) / s + values.mean(0) / e) / precision, rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(found.spread, 1 / precision, rtol=1e-6, atol=0)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distance_zero_gives_back_the_base_posterior(likelihood, outputs, dtype):
    posterior, values = stacked(likelihood, outputs, dtype=dtype)
    base, adjusted = base_ensemble(likelihood, values), Revert(TARGETS)(posterior, X)
    mixed = torch.tensor([0.0, 0.3, 0.0, 5.0, 0.0, 1e4]).double()
    for d, rows in ((torch.zeros(INPUTS), slice(None)), (mixed, slice(0, None, 2))):
        found = adjusted(d)
        assert torch.equal(found.outputs[:, rows], base.outputs[:, rows])
        assert torch.equal(found.log_weights, base.log_weights)
        assert not found.spread[rows].any()
        for statistic in (likelihood.mean, likelihood.variance, likelihood.entropy, likelihood.aleatoric):
            assert torch.equal(statistic(found)[rows], statistic(base)[rows])
    assert not torch.isclose(likelihood.mean(adjusted(mixed))[1::2], likelihood.mean(base)[1::2]).any()


@both
@pytest.mark.parametrize("factor", [0.01, 1.0, 20.0])  # the last: V > S/2, where shrunken draws would lose variance
def test_the_variance_grows_to_its_limit(likelihood, outputs, factor):
    posterior, values = stacked(likelihood, outputs, factor=factor)
    adjusted = Revert(TARGETS)(posterior, X)
    curve = torch.stack([likelihood.variance(adjusted(torch.full((INPUTS,), d, dtype=torch.float64))) for d in GROWING])
    assert (curve.diff(dim=0) >= -1e-12 * curve[:-1]).all()
    assert (curve[4] > curve[0]).all()
    location, noise = locations_and_noise(likelihood, values)
    v, noise = location.var(0), noise.mean(0)
    s = np.maximum(np.array(TOTAL) - noise, 0.01 * np.array(TOTAL))
    far = adjusted(torch.full((INPUTS,), 1e12, dtype=torch.float64))
    np.testing.assert_allclose(likelihood.mean(far), np.broadcast_to(CENTER, (INPUTS, 2)), rtol=1e-9)
    np.testing.assert_allclose(likelihood.variance(far), noise + v + s, rtol=1e-9)


def test_the_noise_may_be_larger_than_the_variance_of_the_targets():
    """A hundredth of it is left to a function."""
    posterior, values = stacked(Gaussian(5.0), 2)
    far = Revert(TARGETS)(posterior, X)(torch.full((INPUTS,), 1e12, dtype=torch.float64))
    wanted = 25 + values.var(0, correction=0) + 0.01 * torch.tensor(TOTAL)
    torch.testing.assert_close(Gaussian(5.0).variance(far), wanted.double())


@both
def test_the_noise_is_that_of_the_posterior_that_predicts(likelihood, outputs):
    """A noise level scaled in-domain counts in S."""
    posterior, values = stacked(likelihood, outputs)
    scaled, d = likelihood.rescaled(2.0), torch.linspace(0, 9, INPUTS, dtype=torch.float64)
    found = Revert(TARGETS)(replace(posterior, likelihood=scaled), X)(d)
    mean, variance = by_hand(scaled, values, d.numpy())
    np.testing.assert_allclose(scaled.mean(found), mean, rtol=1e-12)
    np.testing.assert_allclose(scaled.variance(found), variance, rtol=1e-12)
    assert not np.allclose(mean, by_hand(likelihood, values, d.numpy())[0])


@both
def test_where_draws_agree_nothing_reverts(likelihood, outputs):
    _, values = stacked(likelihood, outputs)
    values[:, 2, 0] = values[0, 2, 0]
    posterior = StackedPredictions(lambda x: values, likelihood)
    base = base_ensemble(likelihood, values)
    for d in (1.0, 1e30, 1e300):  # at the last k² overflows
        found = Revert(TARGETS)(posterior, X)(torch.full((INPUTS,), d, dtype=torch.float64))
        for statistic in (likelihood.mean, likelihood.variance):
            assert statistic(found).isfinite().all()
            torch.testing.assert_close(statistic(found)[2, 0], statistic(base)[2, 0], rtol=1e-12, atol=0)
        assert not torch.isclose(likelihood.mean(found)[2, 1], likelihood.mean(base)[2, 1])
        assert likelihood.entropy(found).isfinite().all()


@both
def test_units_of_the_target(likelihood, outputs):
    """Targets, outputs and noise in other units: predictions in those units."""
    scale, shift = torch.tensor([1e4, 1e-3]).double(), torch.tensor([-7e4, 2.0]).double()
    generator = torch.Generator().manual_seed(4)
    y = torch.randn(50, 2, generator=generator, dtype=torch.float64) * 1.5 + 1
    _, values = stacked(likelihood, outputs)
    d = torch.linspace(0, 9, INPUTS, dtype=torch.float64)
    for k in range(2):  # one target at a time: Gaussian has one noise for all
        own = values[..., [k]] if outputs == 2 else values[..., [k, 2 + k]]
        moved = own.clone()
        moved[..., 0] = own[..., 0] * scale[k] + shift[k]
        other = likelihood.rescaled(float(scale[k]))
        moments = []
        for kind, fixed, targets in ((likelihood, own, y[:, [k]]), (other, moved, y[:, [k]] * scale[k] + shift[k])):
            posterior = StackedPredictions(lambda x, fixed=fixed: fixed, kind)
            found = Revert().fitted(kind, targets)(posterior, X)(d)
            moments.append((kind.mean(found), kind.variance(found)))
        torch.testing.assert_close(moments[1][0], moments[0][0] * scale[k] + shift[k], rtol=1e-8, atol=0)
        torch.testing.assert_close(moments[1][1], moments[0][1] * scale[k] ** 2, rtol=1e-6, atol=0)


@pytest.mark.parametrize("prior_scale", [0.25, 2.0])
def test_k_is_that_of_the_prior_and_closed_moments_are_used(prior_scale):
    """A last layer's mean and variance stand for its draws, at every distance."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2))
    x = torch.randn(40, 2)
    posterior = laplace.last_layer(network, Gaussian(0.5), (x, x.sin()), prior_scale=prior_scale)
    found_moments = posterior.moments(x[:5])
    f, v = found_moments.mean.double().numpy(), found_moments.variance.double().numpy()
    d = torch.tensor([0.0, 0.1, 1.0, 4.0, 1e30]).double()
    adjusted = Revert(TARGETS)(posterior, x[:5])
    found = adjusted(d)
    s = np.array(TOTAL) - 0.25
    e = ((1 + d.numpy() / prior_scale) ** 2 - 1)[:, None] * v
    w = s / (s + e)
    assert len(found.outputs) == 1
    np.testing.assert_allclose(Gaussian(0.5).mean(found), CENTER + w * (f - CENTER), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(Gaussian(0.5).variance(found), 0.25 + v + w * e, rtol=1e-6)
    base = closed_ensemble(Gaussian(0.5), found_moments)
    at_zero = adjusted(torch.zeros(5))
    for one, two in zip(
        at_zero[:1] + tuple(at_zero[1]) + at_zero[2:4], base[:1] + tuple(base[1]) + base[2:4], strict=True
    ):
        assert torch.equal(one, two)


def data(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator)
    clean = torch.stack([x.sum(1), x[:, 0] * x[:, 1]], 1)
    return x, 5 + clean + 0.2 * torch.randn(n, 2, generator=generator)


def calibrated(posterior, **options):
    with warnings.catch_warnings():  # nothing here is trained: the best φ may be at an edge of the search
        warnings.simplefilter("ignore", dapcal.DapcalWarning)
        own = dapcal.calibrate(posterior, train=data(120, 0), held_out=data(80, 1), adjust=Revert(), **options)
    return replace(own, phi=-1.0)


def members(likelihood=None):
    torch.manual_seed(0)
    outputs = 4 if isinstance(likelihood, NoiseHead) else 2
    networks = [nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)) for _ in range(4)]
    return ensemble.of(networks, likelihood or Gaussian(0.3))


def last_layer():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    return laplace.last_layer(network, Gaussian(0.3), data(120, 0), prior_scale=1.0)


POSTERIORS = {"ensemble": members, "noise head": lambda: members(NoiseHead()), "last layer": last_layer}
every_posterior = pytest.mark.parametrize("name", POSTERIORS)


@every_posterior
def test_calibrated_saved_and_in_any_order(name, tmp_path):
    own = calibrated(POSTERIORS[name]())
    y = data(120, 0)[1].double()
    assert own.adjust.targets.mean == pytest.approx(y.mean(0).tolist())
    assert own.adjust.targets.variance == pytest.approx(y.var(0, correction=0).tolist())
    x = torch.cat([data(10, 2)[0], 10 * data(10, 3)[0], 1e15 * data(3, 4)[0]])
    whole = own(x)
    assert (whole.distance > 0).any()
    assert whole.mean.isfinite().all()
    torch.testing.assert_close(whole.mean[-3:], y.mean(0).expand(3, 2).float(), rtol=1e-3, atol=0)
    order = torch.randperm(23, generator=torch.Generator().manual_seed(0))
    for found in (own.predict(x, batch_size=4), own(x[order])[order.argsort()]):
        torch.testing.assert_close(found.mean, whole.mean)
        torch.testing.assert_close(found.variance, whole.variance)
    own.save(tmp_path / "revert.dap")
    again = dapcal.load(tmp_path / "revert.dap", own.posterior.model)
    assert again.adjust == own.adjust
    assert torch.equal(again(x).mean, whole.mean)
    assert torch.equal(again(x).variance, whole.variance)


@every_posterior
def test_a_joint_prediction_is_refused(name):
    with pytest.raises(ValueError, match=r"needs draws, and the closed form of Revert .*Inflate\(drawn=True\)"):
        calibrated(POSTERIORS[name]()).joint(data(4, 5)[0])


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_classification_is_refused(likelihood):
    y = torch.arange(40) % 2
    with pytest.raises(ValueError, match=r"Revert needs numbers as targets.*use Inflate\(\)"):
        Revert().fitted(likelihood, y)
    with pytest.raises(ValueError, match="Revert needs numbers as targets"):
        Revert(TARGETS).fitted(likelihood, y)
    outputs = 1 if isinstance(likelihood, Bernoulli) else 2
    posterior = StackedPredictions(lambda x: torch.randn(3, len(x), outputs), likelihood)
    x = torch.randn(40, 2)
    with pytest.raises(ValueError, match="Revert needs numbers as targets"):
        dapcal.calibrate(posterior, train=(x, y), held_out=(x, y), adjust=Revert())
    with pytest.raises(TypeError, match=f"{type(likelihood).__name__} does not say how outputs shift"):
        likelihood.shifted(torch.zeros(3, 4, outputs), torch.zeros(4, 1))


@pytest.mark.parametrize("value", [0.0, 0.1, -1e6])
def test_constant_targets_are_refused(value):
    y = torch.randn(1000, 2)
    y[:, 1] = value
    with pytest.raises(ValueError, match=r"targets that vary, got the same value everywhere in target 1.*drop"):
        Revert().fitted(Gaussian(), y)
    assert Revert().fitted(Gaussian(), y[:, :1]).targets is not None


def test_before_it_has_seen_targets_it_says_so():
    with pytest.raises(ValueError, match=r"has not seen the training targets.*fitted\(likelihood, y\)"):
        Revert()(stacked(Gaussian(), 2)[0], X)


def test_targets_that_are_given_stay():
    assert Revert(TARGETS).fitted(Gaussian(), torch.randn(9, 2)).targets == TARGETS


def test_single_networks_are_refused():
    with pytest.raises(ValueError, match=r"single network.*variational"):
        Revert(TARGETS)(map.point(nn.Linear(1, 2), Gaussian()), X)


def test_far_away_it_is_nearer_to_the_targets_than_inflate():
    """A network that extrapolates a line where targets stay between −1 and 1."""
    x = torch.linspace(-3, 3, 60)[:, None]
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(0.3)
        model.bias.zero_()
    scale = {name: torch.full_like(p, 0.05) for name, p in model.named_parameters()}
    posterior = gaussian.diagonal(model, Gaussian(0.5), scale, draws=20)
    far, d = torch.tensor([[40.0]]), torch.tensor([10.0])
    y = x.sin()
    likelihood = posterior.likelihood
    density = [
        float(likelihood.log_prob(adjust.fitted(likelihood, y)(posterior, far)(d), far.sin()))
        for adjust in (Revert(), Inflate())
    ]
    assert density[0] > density[1] + 1
