"""MomentMatched: weights against densities, predictions against the exact Gaussian, and what it must not pretend."""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import dapcal
from cases import doubles, inputs, network_posterior
from dapcal.adjust import Reweight, Transport, matched
from dapcal.adjust.matched import MomentMatched
from dapcal.diagnostics import effective_sample_size, pareto_k, pareto_smooth, total_weight
from dapcal.distances import Space
from dapcal.distances.projectors import Identity
from dapcal.ensembles import base_ensemble
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian, NoiseHead
from dapcal.posteriors import gaussian, map, samples
from dapcal.posteriors.predictions import StackedPredictions

LIKELIHOODS = [(Categorical(), 3), (Bernoulli(), 1), (Gaussian(0.3), 2), (NoiseHead(), 4)]
TARGETS = Gaussian(0.5)
DISTANCES = torch.cat([torch.zeros(2), torch.logspace(-2, 3, 10)]).double()


def means(parameters):
    return 0.3 * torch.randn(1, parameters, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def plane(parameters, draws=2000, sigma=0.8, likelihood=TARGETS, **prior):
    """y = weight · x, in float64."""
    model = nn.Linear(parameters, 1, bias=False).double()
    deviations, mean = {"weight": doubles([[sigma] * parameters])}, {"weight": means(parameters)}
    return gaussian.diagonal(model, likelihood, deviations, mean=mean, draws=draws, **prior)


@functools.cache
def many_draws(parameters, likelihood):
    return plane(parameters, 20_000, 0.6, likelihood, seed=7)


def seen(posterior, adjust, d):
    """The parameters themselves (S, P), with their log weights (S,), through inputs that single them out."""
    size = len(posterior.center)
    ensemble = adjust(posterior, torch.eye(size, dtype=torch.float64))(doubles([d] * size))
    assert torch.equal(ensemble.log_weights, ensemble.log_weights[:, :1].expand(-1, size))
    return ensemble.outputs[..., 0], ensemble.log_weights[:, 0]


@pytest.mark.parametrize("sigma0", [1.0, 0.9])
@pytest.mark.parametrize("d", [0.3, 2.0])
def test_weights_are_target_over_proposal(d, sigma0):
    """w = N(θ'; μ_d, σ_d²)/q_T(θ')/S, with the normal q_T read off what the map did to the draws."""
    sigma, posterior = 0.6, plane(2, 100, 0.6, prior_scale=sigma0)
    moved, log_weights = seen(posterior, MomentMatched(), d)
    factor = 1 / (1 - (1 / sigma0**2 - 1 / (sigma0 + d) ** 2) * sigma**2)
    expected = np.full(100, -math.log(100))
    for theta, base, mu in zip(moved.T.numpy(), posterior.draws.T.numpy(), means(2)[0].tolist(), strict=True):
        scale, shift = np.polyfit(base, theta, 1)
        np.testing.assert_allclose(shift + scale * base, theta, atol=1e-12)
        assert abs(shift) > 1e-3 or abs(scale - 1) > 1e-3
        expected += stats.norm.logpdf(theta, factor * mu, sigma * math.sqrt(factor))
        expected -= stats.norm.logpdf(theta, shift + scale * mu, scale * sigma)
    np.testing.assert_allclose(log_weights.numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize(("draws", "scales"), [(1000, False), (200, True)])
@pytest.mark.parametrize("sigma", [0.5, 0.7])
def test_maps_match_the_weighted_moments(draws, scales, sigma):
    """In one round the mean moves to the weighted mean, and the spread stays or goes to the weighted one."""
    posterior = plane(1, draws, sigma)
    base, log_weights = seen(posterior, Reweight(), 3.0)
    share = pareto_smooth(log_weights[:, None])[0].softmax(0)
    mean = (share * base).sum()
    moved, _ = seen(posterior, MomentMatched(step=None, rounds=1), 3.0)
    spread = (share * (base - mean) ** 2).sum() if scales else base.var(correction=0)
    torch.testing.assert_close(moved.mean(), mean, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(moved.var(correction=0), spread, rtol=1e-9, atol=0)


@pytest.mark.parametrize("parameters", [1, 2, 5])
@pytest.mark.parametrize("d", [0.5, 2.0])
@pytest.mark.parametrize("likelihood", [TARGETS, Bernoulli()], ids=["gaussian", "bernoulli"])
def test_predictions_agree_with_transport_and_heavily_sampled_reweight(parameters, d, likelihood):
    posterior, many = plane(parameters, sigma=0.6, likelihood=likelihood), many_draws(parameters, likelihood)
    x = torch.randn(3, parameters, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    distance = doubles([d] * 3)
    weighted = MomentMatched()(posterior, x)(distance)
    values = weighted.conditional.mean
    error = values.std(0) / math.sqrt(len(values))
    moved = Transport(shift=True, step=None)(posterior, x)(distance)
    assert ((likelihood.mean(weighted) - likelihood.mean(moved)).abs() < 4 * math.sqrt(2) * error).all()
    torch.testing.assert_close(likelihood.variance(weighted), likelihood.variance(moved), rtol=0.12, atol=0.005)
    reference = Reweight(normalise=True)(many, x)(distance)
    assert ((likelihood.mean(weighted) - likelihood.mean(reference)).abs() < 5 * error).all()
    torch.testing.assert_close(likelihood.variance(weighted), likelihood.variance(reference), rtol=0.12, atol=0.005)


@pytest.mark.parametrize(("parameters", "d", "gain"), [(1, 10.0, 1.5), (2, 10.0, 2), (5, 10.0, 8), (10, 1.0, 8)])
def test_weights_get_better_with_few_parameters(parameters, d, gain):
    posterior = plane(parameters)
    x, distance = torch.ones(1, parameters).double(), doubles([d])
    before, after = (adjust(posterior, x)(distance).importance for adjust in (Reweight(), MomentMatched()))
    assert effective_sample_size(after) > gain * effective_sample_size(before)
    assert effective_sample_size(after) > 0.7 * len(after)
    assert pareto_k(after) < pareto_k(before) - 0.2
    assert abs(total_weight(after) - 1) < 0.02 < abs(total_weight(before) - 1)


@pytest.mark.parametrize(("parameters", "sigma", "d"), [(100, 0.8, 1.0), (1000, 0.8, 10.0), (1000, 0.3, 1.0)])
def test_nothing_is_pretended_with_many_parameters(parameters, sigma, d, monkeypatch):
    posterior = plane(parameters, 50, sigma)
    x, distance = torch.ones(1, parameters).double(), doubles([d])
    before, after = (adjust(posterior, x)(distance).importance for adjust in (Reweight(), MomentMatched(step=None)))
    assert pareto_k(before) > 0.7
    assert pareto_k(after) > 0.7
    assert total_weight(after) >= 0.999 * total_weight(before)
    if parameters == 1000 and sigma == 0.8:  # k̂ alone would be content with draws that missed the target altogether
        monkeypatch.setattr(matched, "_TOLERANCE", math.inf)
        fooled = MomentMatched(step=None)(posterior, x)(distance).importance
        assert pareto_k(fooled) < pareto_k(before) - 0.5
        assert torch.logsumexp(fooled, 0) < torch.logsumexp(before, 0) - 20


def test_a_threshold_leaves_good_draws_where_they_are():
    posterior, x = plane(3), torch.randn(12, 3, dtype=torch.float64)
    kept, base = (adjust(posterior, x)(DISTANCES) for adjust in (MomentMatched(threshold=9.0), Reweight()))
    assert torch.equal(kept.outputs, base.outputs)
    torch.testing.assert_close(kept.log_weights, base.log_weights, rtol=1e-9, atol=1e-9)
    moved = MomentMatched(threshold=0.3)(posterior, x)(DISTANCES)
    still = (moved.outputs == base.outputs).all(2).all(0)
    good = pareto_k(base.importance) < 0.25  # at the input's own distance, not its level's
    assert still[good].all()
    assert not still[pareto_k(base.importance) > 0.35].any()
    assert not still.all()


def test_the_grid_chooses_the_proposal_alone():
    """Predictions differ by sampling error, and weights are those of the input's own distance."""
    posterior, x, distance = plane(2), torch.ones(1, 2).double(), doubles([1.23])
    found = [MomentMatched(step=step)(posterior, x)(distance) for step in (None, 0.05, 0.1, 0.5)]
    c = 1 - 1 / 2.23**2
    factor = 1 / (1 - c * 0.8**2)
    for ensemble in found:
        mean, variance = (getattr(posterior.likelihood, name)(ensemble).item() for name in ("mean", "variance"))
        assert mean == pytest.approx(factor * means(2).sum().item(), abs=4 * math.sqrt(2 * factor * 0.64 / 2000))
        assert variance == pytest.approx(2 * factor * 0.64 + 0.25, rel=0.12)
        assert abs(total_weight(ensemble.importance) - 1) < 0.02
    assert not torch.equal(found[0].outputs, found[-1].outputs)


def test_only_the_aware_parameters_move():
    model = nn.Linear(1, 1).double()
    scale = {"weight": doubles([[0.7]]), "bias": doubles([0.7])}
    posterior = gaussian.diagonal(model, Gaussian(0.5), scale, draws=200, aware="bias")
    outputs = MomentMatched()(posterior, doubles([[0.0], [1.0]]))(doubles([3.0, 3.0])).outputs[..., 0]
    torch.testing.assert_close(outputs[:, 1] - outputs[:, 0], posterior.draws[:, 0])
    assert (outputs[:, 0] - posterior.draws[:, 1]).abs().max() > 0.01


def test_parameters_without_spread_stay():
    model = nn.Linear(2, 1, bias=False).double()
    posterior = gaussian.diagonal(model, Gaussian(0.5), {"weight": doubles([[0.7, 0.0]])}, draws=200)
    moved, log_weights = seen(posterior, MomentMatched(), 3.0)
    assert torch.equal(moved[:, 1], posterior.draws[:, 1])
    assert not torch.equal(moved[:, 0], posterior.draws[:, 0])
    assert log_weights.isfinite().all()


def test_equal_weights_are_left_alone():
    model = nn.Linear(1, 1).double()
    scale = {"weight": doubles([[0.7]]), "bias": doubles([0.0])}
    posterior = gaussian.diagonal(model, Gaussian(0.5), scale, draws=30, aware="bias")
    x = doubles([[1.0]])
    assert torch.equal(MomentMatched()(posterior, x)(doubles([2.0])).outputs, posterior.outputs(x))


@pytest.mark.parametrize(("likelihood", "outputs"), LIKELIHOODS)
@pytest.mark.parametrize("step", [0.1, None])
def test_distance_zero_gives_back_the_base_posterior(likelihood, outputs, step):
    posterior, x = network_posterior(likelihood, outputs), inputs(12)
    base, adjusted = base_ensemble(likelihood, posterior.outputs(x)), MomentMatched(step=step)(posterior, x)
    for d, rows in ((torch.zeros(12), slice(None)), (DISTANCES, slice(2))):
        ensemble = adjusted(d)
        assert torch.equal(ensemble.outputs[:, rows], base.outputs[:, rows])
        assert torch.equal(ensemble.log_weights[:, rows], base.log_weights[:, rows])
        for statistic in (likelihood.mean, likelihood.variance, likelihood.entropy, likelihood.aleatoric):
            assert torch.equal(statistic(ensemble)[rows], statistic(base)[rows])


@pytest.mark.parametrize("step", [0.1, None])
def test_inputs_do_not_touch_each_other(step):
    posterior, x, adjust = network_posterior(Categorical(), 3, draws=200), inputs(12), MomentMatched(step=step)
    together = adjust(posterior, x)(DISTANCES)
    assert (together.outputs != posterior.outputs(x)).any()
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    shuffled = adjust(posterior, x[order])(DISTANCES[order])
    parts = [adjust(posterior, x[rows])(DISTANCES[rows]) for rows in (slice(0, 5), slice(5, 12))]
    for name in ("outputs", "log_weights", "importance"):
        value = getattr(together, name)
        torch.testing.assert_close(getattr(shuffled, name), value[:, order])
        torch.testing.assert_close(torch.cat([getattr(part, name) for part in parts], 1), value)


def test_normalised_weights_sum_to_one_and_keep_the_diagnostics():
    posterior, x = network_posterior(Categorical(), 3, scale=0.8), inputs(12)
    plain, proper = (MomentMatched(normalise=n)(posterior, x)(DISTANCES) for n in (False, True))
    torch.testing.assert_close(total_weight(proper.log_weights), torch.ones(12).double())
    assert torch.equal(proper.importance, plain.importance)
    torch.testing.assert_close(proper.log_weights, plain.log_weights.log_softmax(0), rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:No distance improves the calibration loss")
def test_a_saved_posterior_predicts_the_same(blobs, posterior, classifier, tmp_path, monkeypatch):
    train, held_out = blobs
    spaces = Space(Identity(), name="inputs")
    options = {"ood": 4 * held_out[0][:20], "distance": spaces, "candidates": 8}
    own = dapcal.calibrate(posterior, train=train, held_out=held_out, adjust=MomentMatched(), **options)
    own = replace(own, phi=0.0)
    own.save(tmp_path / "model.dap")
    loaded = dapcal.load(tmp_path / "model.dap", classifier)
    assert loaded.adjust == own.adjust
    x = 3 * inputs(6)
    one, two = own(x), loaded(x)
    assert (one.distance > 0).any()
    assert torch.equal(one.probs, two.probs)
    assert torch.equal(one.diagnostics.ess, two.diagnostics.ess)


def test_posteriors_without_a_diagonal_gaussian_or_prior_are_refused():
    models = [nn.Linear(2, 3) for _ in range(4)]
    brought = samples.from_state_dicts(models[0], Categorical(), [m.state_dict() for m in models], prior_scale=1.0)
    stacked = StackedPredictions(lambda x: torch.randn(30, len(x), 3), Categorical())
    priorless = replace(network_posterior(Categorical(), 3), prior=None)
    full = gaussian.full(models[0], Categorical(), torch.eye(3) / 9, ["bias"])
    for posterior in (brought, stacked, priorless, full, map.point(models[0], Categorical())):
        with pytest.raises(ValueError, match=r"MomentMatched needs a diagonal Gaussian.*Transport\(shift=True\)"):
            MomentMatched()(posterior, inputs(2))


def test_too_few_draws_are_refused():
    with pytest.raises(ValueError, match="single network"):
        MomentMatched()(network_posterior(Categorical(), 3, draws=1), inputs(2))
    with pytest.raises(ValueError, match=r"at least 25 draws, got 24.*take more draws"):
        MomentMatched()(network_posterior(Categorical(), 3, draws=24), inputs(2))


@pytest.mark.parametrize("option", [{"step": 0.0}, {"step": -0.1}, {"step": math.nan}, {"rounds": 0}])
def test_bad_options_are_refused(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        MomentMatched(**option)
