"""Laplace approximations calibrated: distances, temperature, joint predictions, other priors."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch

import dapcal
from dapcal.adjust import Inflate, Reweight, Transport
from dapcal.distances import Space
from dapcal.distances.projectors import Identity
from dapcal.likelihoods import Categorical, Gaussian
from laplace_cases import (
    KINDS,
    LEARNT,
    METHODS,
    NOISE,
    STRUCTURES,
    at_the_map,
    each_method,
    each_structure,
    eye,
    fitted,
    integers,
    normal,
    precision_of,
    regression,
    trained,
)

each_kind = pytest.mark.parametrize("kind", KINDS)


ADJUSTMENTS = {"inflate": Inflate(), "transport": Transport(), "reweight": Reweight()}


NEW = torch.cat([normal(6, 2, seed=30), 8 * normal(6, 2, seed=31)])


FAR = 6 * normal(40, 2, seed=32)


quietly = pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")  # weights collapse, searches end at an edge


def calibrate(posterior, likelihood: str = "categorical", **options):
    _, _, train, held_out = trained(*LEARNT[likelihood])
    data = {"train": train, "held_out": held_out, "ood": FAR, "distance": Space(Identity()), "candidates": 10}
    return dapcal.calibrate(posterior, **data | options)


@functools.cache
def calibrated_once(kind: str):
    """Calibrated by the default, at a φ that makes far inputs far."""
    return replace(calibrate(fitted(kind)), phi=-1.0)


@quietly
@pytest.mark.parametrize("adjust", ["inflate", "transport"])
@pytest.mark.parametrize("kind", [k for k in KINDS if "drawn" not in k])
def test_calibrated_predictions_know_their_distance(kind, adjust):
    calibrated = replace(calibrate(fitted(kind), adjust=ADJUSTMENTS[adjust]), phi=-1.0)
    prediction, moments = calibrated(NEW), calibrated.posterior.moments(NEW)
    torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(12, dtype=torch.float64))
    assert (prediction.distance[6:] > 0).all()
    assert (prediction.probs.max(-1).values[6:] < prediction.base.probs.max(-1).values[6:]).all()
    near = prediction.distance == 0
    assert near.any()
    assert torch.equal(prediction.probs[near], prediction.base.probs[near])
    assert torch.equal(prediction.probs.argmax(-1), moments.mean.argmax(-1))


@quietly
@each_kind
def test_reweighted_predictions_are_calibrated(kind):
    calibrated = calibrate(fitted(kind), adjust=Reweight(), guard=None)
    assert calibrated(NEW).diagnostics.total_weight.isfinite().all()
    assert calibrated(NEW).ensemble.outputs.shape == (30, 12, 3)


@quietly
@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian"])
@pytest.mark.parametrize("adjust", ["inflate", "transport"])
@pytest.mark.parametrize("kind", ["fit, kronecker", "last layer, full"])
def test_other_likelihoods_are_calibrated(kind, adjust, likelihood):
    found = calibrate(fitted(kind, likelihood), likelihood, adjust=ADJUSTMENTS[adjust], guard=None)
    calibrated = replace(found, phi=-1.0)
    prediction = calibrated(NEW)
    assert (prediction.epistemic[6:] > prediction.base.epistemic[6:]).all()
    if likelihood == "gaussian":
        moments = calibrated.posterior.moments(NEW)
        torch.testing.assert_close(prediction.base.epistemic, moments.variance)
        torch.testing.assert_close(prediction.mean, moments.mean)


@quietly
@pytest.mark.parametrize("likelihood", LEARNT)
@pytest.mark.parametrize("kind", ["fit, diagonal", "last layer, kronecker"])
def test_temperature_minimises_the_closed_nll(kind, likelihood):
    posterior = fitted(kind, likelihood)
    calibrated = calibrate(posterior, likelihood, temperature=True, guard=None, seed=3)
    _, _, _, (x, y) = trained(*LEARNT[likelihood])
    first = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))[: (len(x) + 1) // 2]

    def nll(factor: float) -> float:
        scaled = replace(posterior, likelihood=calibrated.posterior.likelihood.rescaled(factor))
        base = Inflate()(scaled, x[first])(torch.zeros(len(first)))
        targets = scaled.likelihood.check(base.outputs, y[first])
        return -float(scaled.likelihood.log_prob(base, targets).mean())

    assert calibrated.posterior.likelihood != posterior.likelihood
    assert all(nll(1.0) < nll(step) for step in (0.5, 0.95, 1.05, 2.0))


@quietly
@each_kind
def test_joint_predictions_need_draws(kind):
    posterior = fitted(kind)
    closed = posterior.linear is not None
    for adjust in (Inflate(), Transport()):
        name = type(adjust).__name__
        calibrated = replace(calibrated_once(kind), adjust=adjust)
        if closed or isinstance(adjust, Inflate):
            with pytest.raises(ValueError, match=rf"closed form of {name} has a spread alone.*{name}\(drawn=True\)"):
                calibrated.joint(NEW)
    for adjust in (Inflate(drawn=True), Transport(drawn=True), Transport(shift=True), Reweight()):
        prediction = replace(calibrated_once(kind), adjust=adjust).joint(NEW)
        assert prediction.is_joint
        assert prediction.log_prob_joint(integers(3, 12)).isfinite()
        assert len(prediction.distance.unique()) == 1


@quietly
@pytest.mark.parametrize("kind", ["fit, full", "last layer, kronecker"])
@pytest.mark.parametrize("adjust", [Inflate(drawn=True), Transport(drawn=True)])
def test_drawn_adjustments_are_calibrated(kind, adjust):
    calibrated = calibrate(fitted(kind, draws=10), adjust=adjust, candidates=3)
    assert calibrated.joint(NEW).ensemble.outputs.shape == (10, 12, 3)
    assert not calibrated(NEW).ensemble.spread.any()


@quietly
@pytest.mark.parametrize("adjust", ["inflate", "transport"])
def test_one_draw_is_enough_for_closed_forms(adjust):
    one, many = (calibrate(fitted("last layer, full", draws=n), adjust=ADJUSTMENTS[adjust])(NEW).probs for n in (1, 30))
    assert torch.equal(one, many)


@quietly
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_method
def test_predictions_keep_the_dtype(method, dtype):
    model, likelihood, train, held_out = trained(Categorical(), 3)
    train, held_out = ((x.to(dtype), y) for x, y in (train, held_out))
    posterior = METHODS[method](copy.deepcopy(model).to(dtype), likelihood, train)
    data = {"train": train, "held_out": held_out, "ood": FAR.to(dtype), "distance": Space(Identity())}
    calibrated = replace(dapcal.calibrate(posterior, **data, candidates=10, adjust=Transport()), phi=-1.0)
    prediction = calibrated(NEW.to(dtype))
    assert prediction.probs.dtype == posterior.draws.dtype == dtype
    exact = fitted(f"{method}, {'kronecker' if method == 'fit' else 'full'}")
    expected = replace(calibrate(exact, adjust=Transport()), phi=-1.0)(NEW).probs
    torch.testing.assert_close(prediction.probs.double(), expected, rtol=1e-3, atol=1e-4)


@each_method
@each_structure
def test_another_prior_widens_the_same_gaussian(method, structure):
    """J (Σ⁻¹ − C)⁻¹ Jᵀ with C of the new σ0, and Σ of the old one."""
    x, y, _ = regression()
    posterior = METHODS[method](
        at_the_map(x, y, 1.5), Gaussian(NOISE), (x, y), structure=STRUCTURES[structure], prior_scale=1.5
    )
    other = posterior.with_prior(2.5)
    assert torch.equal(other.draws, posterior.draws)
    features = torch.cat([x[:4], torch.ones(4, 1, dtype=torch.float64)], 1)
    moved = torch.linalg.inv(precision_of(posterior) - (1 / 2.5**2 - 1 / 4.0**2) * eye(3))
    expected = (features @ moved * features).sum(1, keepdim=True)
    torch.testing.assert_close(Transport()(other, x[:4])(torch.full((4,), 1.5)).spread, expected, rtol=1e-8, atol=1e-12)


def test_another_prior_does_not_cut_a_layer():
    posterior = fitted("last layer, kronecker").with_prior({"*.weight": 1.0, "*": 2.0})
    with pytest.raises(ValueError, match="rotated as a whole"):
        Transport(drawn=True)(posterior, NEW)(torch.ones(12))


def test_another_prior_does_not_cut_a_layer_in_closed_form_either():
    posterior = fitted("last layer, kronecker").with_prior({"*.weight": 1.0, "*": 2.0})
    with pytest.raises(ValueError, match="rotated as a whole"):
        Transport()(posterior, NEW)
