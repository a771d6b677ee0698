"""Stochastic-gradient MCMC: the exact posterior of a linear model, where draws are taken, resuming."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dapcal
from cases import Fragile, Killed, KnownNoise
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.posteriors import map as map_posterior
from dapcal.posteriors import sgmcmc
from dapcal.posteriors.training import constant

SAMPLERS = {"sgld": sgmcmc.sgld, "sghmc": sgmcmc.sghmc}
COPIES = 300  # regressions with the same inputs: independent chains in one network


def regressions(n: int = 60):
    """Linear regressions of two inputs with noise 0.5, their posterior means (COPIES, 2) and precision (2, 2)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=generator)
    x[:, 1] = 0.5 * x[:, 0] + math.sqrt(0.75) * x[:, 1]
    y = (x @ torch.tensor([1.0, -0.5]))[:, None] + 0.5 * torch.randn(n, COPIES, generator=generator)
    precision = x.T @ x / 0.25 + torch.eye(2) / 1.5**2
    return x, y, torch.linalg.solve(precision, x.T @ y / 0.25).T, precision


def network(batch_norm: bool = True) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(16) if batch_norm else nn.Identity()
        return nn.Sequential(nn.Linear(2, 16), norm, nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))


# The stationary distribution


def predicted(curvature, plan, rate, steps, n):
    """Covariance at the places of draws, averaged: with full batches (θ, v) moves linearly, from (mean, 0)."""
    keep, share = (0.0, 1.0) if plan.friction is None else (1 - plan.friction, plan.friction)
    second = np.zeros((4, 4))
    taken, places, stages = [], plan.places(steps), plan.stages(steps)
    for k in range(steps):
        eta = rate * 0.5 * (math.cos(math.pi * (k * plan.cycles % steps) / steps) + 1)
        push, stay = -eta * curvature, keep * np.eye(2)
        move = np.block([[np.eye(2) + push, stay], [push, stay]])
        noise = 2 * share * eta * plan.temperature / n * any(k in stage for stage in stages)
        second = move @ second @ move.T + noise * np.kron(np.ones((2, 2)), np.eye(2))
        if k in places:
            taken.append(second[:2, :2])
    return np.mean(taken, 0)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("name", SAMPLERS)
def test_draws_have_the_moments_of_the_exact_posterior(name, temperature):
    """Against the recursion within Monte Carlo error; against T Σ within that and 3 % of discretisation.

    About 10 independent draws from each of 300 chains: covariances have relative errors of about √(2/3000) = 2.6 %.
    """
    x, y, mean, precision = regressions()
    rate, epochs, draws = 0.02, 1000, 100
    more = {} if name == "sgld" else {"friction": 0.2}
    model = nn.Linear(2, COPIES, bias=False)
    with torch.no_grad():
        model.weight.copy_(mean)
    posterior = SAMPLERS[name](
        model, KnownNoise(0.5), (x, y), prior_scale=1.5, cycles=2, exploration=0.1, temperature=temperature,
        draws=draws, epochs=epochs, batch_size=60, learning_rate=rate, **more,
    )  # fmt: skip
    deviation = (posterior.draws.reshape(draws, COPIES, 2) - mean).double()
    found = torch.einsum("scp,scq->pq", deviation, deviation).numpy() / (draws * COPIES)
    exact = temperature * torch.linalg.inv(precision.double()).numpy()
    plan = sgmcmc.Cycles(2, 0.1, temperature, draws, more.get("friction"))
    curvature = precision.double().numpy() / 60
    expected = predicted(curvature, plan, rate, epochs, 60)
    scale = np.sqrt(np.outer(exact.diagonal(), exact.diagonal()))
    np.testing.assert_allclose(found / scale, expected / scale, atol=0.05)
    np.testing.assert_allclose(expected / scale, exact / scale, atol=0.03)
    assert (deviation.mean((0, 1)).abs().numpy() < 4 * np.sqrt(exact.diagonal() / (10 * COPIES))).all()


def test_minibatches_sample_the_same_posterior():
    """Noise of minibatches adds variance, which a smaller step takes away."""
    x, y, mean, precision = regressions()
    model = nn.Linear(2, COPIES, bias=False)
    with torch.no_grad():
        model.weight.copy_(mean)
    posterior = sgmcmc.sgld(
        model, KnownNoise(0.5), (x, y), prior_scale=1.5, cycles=1, exploration=0.1, draws=100, epochs=500,
        batch_size=30, learning_rate=0.008,
    )  # fmt: skip
    deviation = (posterior.draws.reshape(-1, COPIES, 2) - mean)[50:]
    exact = torch.linalg.inv(precision).diagonal()
    torch.testing.assert_close((deviation**2).mean((0, 1)), exact, rtol=0.1, atol=0)


def test_full_friction_is_langevin(blobs):
    options = {"draws": 8, "epochs": 8, "batch_size": 16}
    one = sgmcmc.sgld(network(), Categorical(), blobs[0], **options)
    two = sgmcmc.sghmc(network(), Categorical(), blobs[0], friction=1.0, **options)
    assert torch.equal(one.draws, two.draws)


# What happens when


@pytest.mark.parametrize("steps", [96, 100, 1234])
@pytest.mark.parametrize("cycles", [1, 3, 7])
@pytest.mark.parametrize("exploration", [0.0, 0.5, 0.8])
def test_places(steps, cycles, exploration):
    plan = sgmcmc.Cycles(cycles, exploration, 1.0, 10, None)
    stages, places = plan.stages(steps), plan.places(steps)
    phase = np.array([k * cycles / steps % 1 for k in range(steps)])
    sampling = np.zeros(steps, bool)
    for stage in stages:
        sampling[list(stage)] = True
    assert np.abs(phase[sampling].min() - exploration) < 1.5 * cycles / steps
    assert phase[~sampling].max(initial=0) <= exploration + 1.5 * cycles / steps
    assert list(places.values()) == list(range(10))
    assert all(sampling[k] for k in places)
    counts = [sum(k in stage for k in places) for stage in stages]
    assert sum(counts) == 10
    assert counts == sorted(counts)
    assert max(counts) - min(counts) <= 1
    for stage in stages:
        own = [k for k in places if k in stage]
        assert own[-1] == stage[-1]
        gaps = np.diff([stage[0] - 1, *own])
        assert gaps.max() - gaps.min() <= 1
    assert [plan.rate(k, steps) for k in range(steps)] == pytest.approx(0.5 * (np.cos(np.pi * phase) + 1))


@pytest.mark.parametrize("name", SAMPLERS)
def test_draws_are_the_iterates_at_those_places(blobs, monkeypatch, name):
    iterates = []
    inner = sgmcmc.log_joint

    def watched(*arguments):
        joint = inner(*arguments)
        own = type(joint).loss

        class Watched(type(joint)):
            def loss(self, x, y):
                iterates.append(self.vector)
                return own(self, x, y)

        return Watched(**vars(joint))

    monkeypatch.setattr(sgmcmc, "log_joint", watched)
    posterior = SAMPLERS[name](network(), Categorical(), blobs[0], cycles=2, draws=6, epochs=8, batch_size=16)
    assert len(iterates) == 80
    for draw, after in enumerate([27, 34, 40, 67, 74]):  # thirds of steps 20 to 39 and 60 to 79
        assert torch.equal(posterior.draws[draw], iterates[after])
    assert not torch.equal(posterior.draws[5], iterates[79])


@pytest.mark.parametrize("name", SAMPLERS)
def test_exploring_is_gradient_descent(name):
    x, y, _, precision = regressions()
    y = y[:, :1]
    model = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, 1.0]]))
    posterior = SAMPLERS[name](
        model, KnownNoise(0.5), (x.double(), y.double()), prior_scale=1.5, cycles=1, exploration=0.9, draws=1,
        temperature=1e-30, epochs=10, batch_size=60, learning_rate=0.01,
    )  # fmt: skip
    theta, v, keep = np.array([2.0, 1.0]), np.zeros(2), {"sgld": 0.0, "sghmc": 0.9}[name]
    h, b = precision.numpy() / 60, (x.T @ y[:, 0] / 0.25).numpy() / 60
    for k in range(10):
        v = keep * v - 0.005 * (math.cos(math.pi * k / 10) + 1) * (h @ theta - b)
        theta = theta + v
    np.testing.assert_allclose(posterior.draws[0], theta, rtol=1e-5)


def test_the_network_that_stands_for_it_has_a_low_loss(blobs):
    x, y = blobs[0]
    posterior = sgmcmc.sghmc(network(False), Categorical(), (x, y), draws=20, epochs=20, batch_size=16)
    losses = [nn.functional.cross_entropy(outputs, y).item() for outputs in posterior.outputs(x)]
    chosen = nn.functional.cross_entropy(posterior.network(x), y).item()
    assert any(torch.equal(posterior.center, draw) for draw in posterior.draws)
    assert chosen < np.median(losses)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("loader", [False, True])
def test_it_classifies_and_calibrates(blobs, name, loader):
    (x, y), (x_new, y_new) = blobs
    train = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True) if loader else (x, y)
    start = map_posterior.fit(network(), Categorical(), (x, y), epochs=20, learning_rate=0.02).network
    nll = []
    posterior = SAMPLERS[name](
        start, Categorical(), train, draws=20, epochs=20, batch_size=16, held_out=(x_new, y_new),
        progress=lambda epoch: nll.append(epoch.held_out_nll),
    )  # fmt: skip
    probabilities = posterior.outputs(x_new).softmax(-1).mean(0)
    assert (probabilities.argmax(-1) == y_new).double().mean() > 0.95
    assert len(nll) == 20
    assert max(nll) < 0.3
    assert torch.equal(posterior.shared["1.running_mean"], start[1].running_mean)
    assert posterior.gaussian is None
    calibrated = dapcal.calibrate(posterior, train=(x, y), held_out=(x_new, y_new), ood=3 * x_new)
    far = torch.tensor([[6.0, -6.0]])
    assert calibrated(far).probs.max() < posterior.outputs(far).softmax(-1).mean(0).max()


def test_held_out_data_change_nothing(blobs):
    one, two = (
        sgmcmc.sgld(network(), Categorical(), blobs[0], draws=4, epochs=4, held_out=held_out)
        for held_out in (None, blobs[1])
    )
    assert torch.equal(one.draws, two.draws)


def test_the_likelihood_is_held():
    x, y, _, _ = regressions()
    likelihood = Gaussian(0.7)
    posterior = sgmcmc.sgld(nn.Linear(2, 1), likelihood, (x, y[:, :1]), draws=4, epochs=8)
    assert posterior.likelihood == likelihood


# Resuming, seeds, state


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("dies_at", [17, 38, 80])
def test_a_run_killed_in_the_middle_of_a_cycle_goes_on(tmp_path, blobs, name, dies_at):
    """8 epochs of 10 minibatches in 2 cycles, checkpoints after every step."""
    options = {"cycles": 2, "draws": 9, "epochs": 8, "batch_size": 15, "checkpoint_seconds": 0}
    fit = SAMPLERS[name]
    reference = fit(Fragile(network()), Categorical(), blobs[0], **options)
    path = tmp_path / "run"
    with pytest.raises(Killed):
        fit(Fragile(network(), dies_at), Categorical(), blobs[0], checkpoint=path, **options)
    model, epochs = Fragile(network()), []
    resumed = fit(model, Categorical(), blobs[0], checkpoint=path, **options)
    assert torch.equal(resumed.draws, reference.draws)
    assert torch.equal(resumed.center, reference.center)
    again = fit(Fragile(network()), Categorical(), blobs[0], checkpoint=path, progress=epochs.append, **options)
    assert torch.equal(again.draws, reference.draws)
    assert epochs == []


def test_a_loader_goes_on_at_the_end_of_an_epoch(tmp_path, blobs):
    def fit(model, **more):
        loader = DataLoader(TensorDataset(*blobs[0]), batch_size=15, shuffle=True)
        return sgmcmc.sghmc(model, Categorical(), loader, draws=8, epochs=8, checkpoint_seconds=0, **more)

    reference = fit(Fragile(network()))
    with pytest.raises(Killed):
        fit(Fragile(network(), 55), checkpoint=tmp_path / "run")
    assert torch.equal(fit(Fragile(network()), checkpoint=tmp_path / "run").draws, reference.draws)


@pytest.mark.parametrize("change", [{"cycles": 2}, {"temperature": 0.5}, {"exploration": 0.2}, {"friction": 0.2}])
def test_a_checkpoint_of_other_settings_is_refused(tmp_path, blobs, change):
    options = {"epochs": 8, "draws": 4, "checkpoint": tmp_path / "run"}
    sgmcmc.sghmc(network(), Categorical(), blobs[0], **options)
    with pytest.raises(ValueError, match="another run"):
        sgmcmc.sghmc(network(), Categorical(), blobs[0], **options, **change)


@pytest.mark.parametrize("name", SAMPLERS)
def test_it_is_seeded_and_leaves_model_and_global_generator_alone(blobs, name):
    model = network()
    before, state = {n: t.clone() for n, t in model.state_dict().items()}, torch.random.get_rng_state()
    one, two, three = (SAMPLERS[name](model, Categorical(), blobs[0], epochs=4, draws=4, seed=s) for s in (0, 0, 1))
    assert torch.equal(one.draws, two.draws)
    assert not torch.equal(one.draws, three.draws)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert model.training


def test_frozen_parameters_stay(blobs):
    model = network()
    model[0].requires_grad_(False)
    posterior = sgmcmc.sghmc(model, Categorical(), blobs[0], epochs=4, draws=4)
    assert posterior.layout.names == ("1.weight", "1.bias", "4.weight", "4.bias")
    assert torch.equal(posterior.network[0].weight, model[0].weight)


def test_bfloat16(blobs):
    posterior = sgmcmc.sghmc(network(), Categorical(), blobs[0], epochs=4, draws=4, bf16=True)
    assert posterior.draws.dtype == torch.float32
    assert posterior.draws.isfinite().all()


# Refusals


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cycles": 0}, "`cycles` >= 1"),
        ({"cycles": 5, "draws": 4}, "5 cycles and 4 draws"),
        ({"exploration": 1.0}, "`exploration` at least 0 and under 1"),
        ({"temperature": 0.0}, "`temperature` > 0"),
        ({"friction": 0.0}, "`friction` over 0"),
        ({"friction": 1.5}, "`friction` over 0"),
        ({"epochs": 20, "draws": 50}, "at least 12 sampling steps in cycle 1 .* got 5 of 40 .*raise `epochs`"),
        ({"epochs": 0}, "got 0 of 0 steps"),
        ({"optimizer": torch.optim.SGD}, "no `optimizer`: the sampler takes its own steps"),
        ({"schedule": constant}, "no `schedule`: the step size follows the cycles"),
        ({"patience": 2}, "no `patience`"),
    ],
)
def test_refusals(blobs, wrong, message):
    with pytest.raises(ValueError, match=message):
        sgmcmc.sghmc(network(), Categorical(), blobs[0], **{"held_out": blobs[1], **wrong})


def test_a_step_too_large_is_an_error():
    x, y, _, _ = regressions()
    with pytest.raises(ValueError, match=r"The loss became .*lower `learning_rate`"):
        sgmcmc.sgld(nn.Linear(2, 1), KnownNoise(0.5), (x, y[:, :1]), draws=4, epochs=400, learning_rate=10.0)
