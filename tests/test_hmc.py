"""Hamiltonian Monte Carlo: against exact posteriors within Monte Carlo error; what stays untouched; what is told."""

from __future__ import annotations

import math
import sys
import warnings
from dataclasses import dataclass

import pytest
import torch
from arviz_stats.base import array_stats
from torch import Tensor, nn

import dapcal
from dapcal.adjust import Reweight, SelfNormalised
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian
from dapcal.posteriors import hmc
from dapcal.types import DapcalWarning

QUICK = {"draws": 6, "warm_up": 19, "max_tree_depth": 4}  # fewer draws than are judged


class Tied(nn.Module):
    """One weight used twice, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.two.weight = self.one.weight
        self.register_buffer("shift", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x))) + self.shift


@dataclass(frozen=True)
class Walled(Gaussian):
    """No density where the output is over one: trajectories that cross the wall diverge."""

    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        return super().log_likelihood(outputs, y) - torch.where(outputs[..., 0] > 1, 1e6, 0.0)


def line():
    """A linear regression of two correlated inputs with noise 0.5, and its exact posterior under N(0, 1.5²)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=generator, dtype=torch.float64)
    x[:, 1] = 0.8 * x[:, 0] + 0.6 * x[:, 1]
    y = x @ torch.tensor([1.0, -0.5], dtype=torch.float64) + 0.5 * torch.randn(40, generator=generator)
    covariance = torch.linalg.inv(x.T @ x / 0.25 + torch.eye(2) / 1.5**2)
    return x.float(), y.float(), covariance @ x.T @ y / 0.25, covariance


def linear(inputs: int = 2, outputs: int = 1, bias: bool = False) -> nn.Module:
    model = nn.Linear(inputs, outputs, bias=bias)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.3)
    return model


def assert_moments(draws: Tensor, chains: int, mean: Tensor, covariance: Tensor) -> None:
    """Mean and covariance within four Monte Carlo standard errors, from the effective number of draws of each."""
    centred = draws.double() - mean
    pairs = [(i, j) for i in range(len(mean)) for j in range(i + 1)]
    products = torch.stack([centred[:, i] * centred[:, j] for i, j in pairs], 1)
    errors = torch.cat([centred.mean(0), products.mean(0) - torch.stack([covariance[i, j] for i, j in pairs])])
    variances = torch.cat([centred, products], 1).var(0)
    each = torch.cat([centred, products], 1).reshape(chains, -1, len(errors)).permute(2, 0, 1).numpy()
    effective = torch.tensor([float(array_stats.ess(values, method="mean")) for values in each])
    assert (effective > 40).all()  # else the tolerances say little
    assert (errors.abs() < 4 * (variances / effective).sqrt()).all()


def test_a_logistic_regression_agrees_with_quadrature_on_a_grid(generator):
    x = torch.randn(12, 2, generator=generator)
    y = (x[:, 0] > 0.3).long()
    axis = torch.linspace(-11, 11, 401, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)  # (401², 2)
    logits = grid @ x.double().T
    log_joint = -nn.functional.softplus(torch.where(y == 1, -logits, logits)).sum(1) - (grid**2).sum(1) / 8
    weights = (log_joint - log_joint.max()).exp()
    weights = weights / weights.sum()
    assert weights.reshape(401, 401)[[0, -1]].sum() < 1e-6
    mean = weights @ grid
    covariance = (grid - mean).T @ (weights[:, None] * (grid - mean))
    posterior = hmc.fit(linear(), Bernoulli(), (x, y), prior_scale=2.0, draws=300, warm_up=100)
    assert_moments(posterior.draws, 1, mean, covariance)
    probability = torch.sigmoid(weights @ grid @ x.double().T)  # at the mean: differs from the mean probability
    predicted = posterior.outputs(x).double().sigmoid().mean(0)[:, 0]
    exact = weights @ torch.sigmoid(logits)
    assert ((predicted - exact).abs() < 0.03).all()
    assert (exact - probability).abs().max() > 0.06


def test_the_network_that_stands_for_it_is_the_likeliest_draw():
    x, y, _, _ = line()
    posterior = hmc.fit(linear(bias=True), Gaussian(0.5), (x, y), prior_scale={"bias": 0.1, "*": 2.0}, **QUICK)
    outputs = posterior.outputs(x)[..., 0].double()
    sigma0 = torch.tensor([2.0, 2.0, 0.1])
    log_joint = -((outputs - y) ** 2).sum(1) / 0.5 - ((posterior.draws / sigma0) ** 2).sum(1) / 2
    assert torch.equal(posterior.center, posterior.draws[log_joint.argmax()])
    torch.testing.assert_close(posterior.network(x).detach(), posterior.outputs(x)[log_joint.argmax()])
    assert posterior.gaussian is None
    assert sorted(posterior.prior.sigma0.tolist()) == [0.1, 2.0]
    assert posterior.squared_norms.shape == (6, 2)
    assert posterior.likelihood == Gaussian(0.5)


def test_without_information_the_posterior_is_the_prior():
    """Weights and biases, all independent, have their own σ0: mean squares within four standard errors."""
    scales = {"weight": 2.0, "bias": 0.5}
    nothing = torch.zeros(2, 2), torch.zeros(2, 15)
    posterior = hmc.fit(linear(2, 15, bias=True), Gaussian(1e6), nothing, prior_scale=scales, draws=60, warm_up=60)
    for name, drawn in posterior.layout.unflatten(posterior.draws.double()).items():
        squares = (drawn / scales[name]).flatten(1).square().mean(1).numpy()
        error = squares.std() / float(array_stats.ess(squares[None], method="mean")) ** 0.5
        assert abs(squares.mean() - 1) < 4 * error < 0.4


def test_seeds_chains_and_thinning():
    x, y, _, _ = line()

    def fit(draws: int, **options) -> Tensor:
        return hmc.fit(linear(), Gaussian(0.5), (x, y), **{**QUICK, "draws": draws, **options}).draws

    first = fit(8)
    assert torch.equal(first, fit(8))
    assert not torch.equal(first, fit(8, seed=1))
    assert torch.equal(first[1::2], fit(4, thin=2))
    both = fit(16, chains=2)
    assert torch.equal(both[:8], first)
    assert not torch.isin(both[8:], first).any()


def test_chains_start_apart_with_seeds_of_their_own(monkeypatch):
    x, y, _, _ = line()
    starts, seeds, run = [], [], hmc._run

    def recorded(kernel, *arguments):
        starts.append(kernel.initial_params["theta"])
        seeds.append(torch.initial_seed())
        return run(kernel, *arguments)

    monkeypatch.setattr(hmc, "_run", recorded)
    hmc.fit(linear(), Gaussian(0.5), (x, y), chains=3, **QUICK)
    torch.testing.assert_close(starts[0], torch.full((2,), 0.3).double())
    apart = torch.stack(starts)[1:] - starts[0]
    assert (apart != 0).all()
    assert apart.abs().max() < 0.1
    assert len(set(seeds)) == 3


def test_nothing_global_changes():
    import pyro

    x, y, _, _ = line()
    model = linear()
    pyro.get_param_store()["mine"] = torch.ones(1)
    before = torch.random.get_rng_state()
    hmc.fit(model, Gaussian(0.5), (x, y), chains=2, **QUICK)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert pyro.settings.get("validate_distributions_pyro")
    assert list(pyro.get_param_store()) == ["mine"]
    pyro.clear_param_store()


def test_nothing_is_printed_and_progress_is_told(capfd):
    x, y, _, _ = line()
    seen = []
    options = {"draws": 4, "warm_up": 10, "chains": 2, "thin": 3}
    hmc.fit(linear(), Gaussian(0.5), (x, y), progress=lambda *told: seen.append(told), **options)
    assert seen == [("sampling", done, 2 * (10 + 3 * 2)) for done in range(1, 33)]
    assert capfd.readouterr() == ("", "")


def test_the_model_and_its_frozen_parameters_stay(blobs):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).train()
    model[0].requires_grad_(False)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    posterior = hmc.fit(model, Categorical(), blobs[0], **QUICK)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert model.training
    assert [n for n, p in model.named_parameters() if p.requires_grad] == list(posterior.layout.names)
    assert posterior.layout.names == ("1.weight", "1.bias", "2.weight", "2.bias")
    assert all(torch.equal(t, before[n]) for n, t in posterior.shared.items())
    assert {"0.weight", "0.bias", "1.running_mean", "1.running_var"} <= set(posterior.shared)


def test_dropout_is_off_and_batch_norm_uses_its_statistics(blobs):
    (x, y), _ = blobs
    plain = nn.Sequential(nn.BatchNorm1d(2, affine=False), linear(2, 3, bias=True))
    plain[0].running_mean.fill_(0.5)
    dropping = nn.Sequential(plain[0], plain[1], nn.Dropout(0.5)).train()
    one, two = (hmc.fit(model, Categorical(), (x, y), **QUICK) for model in (plain, dropping))
    torch.testing.assert_close(one.draws, two.draws)
    weight, bias = one.layout.unflatten(one.draws[2]).values()
    torch.testing.assert_close(one.outputs(x)[2], (x - 0.5) / math.sqrt(1 + 1e-5) @ weight.T + bias)


def test_tied_parameters_count_once(generator):
    x = torch.randn(20, 2, generator=generator)
    model = Tied()
    posterior = hmc.fit(model, Gaussian(0.5), (x, x), **QUICK)
    assert posterior.draws.shape == (6, 4)
    for s in (0, 5):
        weight = posterior.draws[s].reshape(2, 2)
        torch.testing.assert_close(posterior.outputs(x)[s], torch.tanh(x @ weight.T) @ weight.T + 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_have_the_dtype_of_the_model(dtype):
    x, y, _, _ = line()
    posterior = hmc.fit(linear().to(dtype), Gaussian(0.5), (x.to(dtype), y.to(dtype)), **QUICK)
    assert posterior.draws.dtype == posterior.center.dtype == posterior.outputs(x.to(dtype)).dtype == dtype


def test_a_model_with_a_single_output_dimension():
    x, y, _, _ = line()
    posterior = hmc.fit(nn.Sequential(linear(), nn.Flatten(0)), Gaussian(0.5), (x, y), **QUICK)
    assert posterior.outputs(x).shape == (6, 40, 1)


def test_it_calibrates(blobs):
    train, held_out = blobs
    posterior = hmc.fit(linear(2, 3), Categorical(), train, draws=18, warm_up=19, max_tree_depth=5)
    calibrated = dapcal.calibrate(posterior, train=train, held_out=held_out, ood=6 * held_out[0])
    near, far = calibrated(torch.tensor([[2.0, 0.0], [60.0, 0.0]])).probs.amax(1)
    base = calibrated.posterior.outputs(torch.tensor([[60.0, 0.0]])).softmax(-1).mean(0).max()
    assert near > 0.9
    assert far < base - 0.05
    weighted = Reweight(SelfNormalised())(posterior, held_out[0])(torch.full((120,), 0.1))
    assert weighted.log_weights.std() > 0


# what is told


def test_divergences_are_told():
    x = torch.ones(5, 1)
    with pytest.warns(DapcalWarning, match=r"of 60 transitions diverged: .* raise `target_accept`"):
        hmc.fit(linear(1), Walled(1.0), (x, torch.ones(5)), draws=60, warm_up=40)


def test_a_chain_that_is_still_on_its_way_is_told():
    x, y, _, _ = line()
    model = linear()
    with torch.no_grad():
        model.weight.fill_(60.0)
    with pytest.warns(DapcalWarning, match=r"has not mixed: split R̂ .* `warm_up`"):
        hmc.fit(model, Gaussian(20.0), (x, y), draws=40, warm_up=19, max_tree_depth=1, target_accept=0.995)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (lambda g: torch.randn(1, 100, generator=g), False),
        (lambda g: torch.randn(4, 25, generator=g), False),
        (lambda g: torch.randn(1, 100, generator=g).cumsum(1), True),
        (lambda g: torch.randn(2, 50, generator=g) + torch.tensor([[0.0], [2.0]]), True),
        (lambda g: torch.ones(1, 100), True),
        (lambda g: torch.randn(1, 19, generator=g).cumsum(1), False),  # too short to be judged
    ],
    ids=["independent", "four chains", "random walk", "two levels", "stuck", "short"],
)
def test_mixing_is_judged_by_the_log_joint(generator, values, told):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hmc._judge(values(generator).double(), 0, 100)
    assert [w.category for w in caught] == [DapcalWarning] * told


def test_the_r_hat_that_is_told_is_arviz_s(generator):
    log_joint = torch.randn(2, 60, generator=generator, dtype=torch.float64).cumsum(1)
    r_hat = float(array_stats.rhat(log_joint.numpy(), method="split"))
    with pytest.warns(DapcalWarning, match=f"split R̂ {r_hat:.2f} "):
        hmc._judge(log_joint, 0, 120)


# what is refused


def test_without_pyro_the_extra_is_named(monkeypatch):
    x, y, _, _ = line()
    monkeypatch.setitem(sys.modules, "pyro", None)
    with pytest.raises(ImportError, match=r"pip install 'dapcal\[mcmc\]'"):
        hmc.fit(linear(), Gaussian(0.5), (x, y), **QUICK)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draws": 0}, "`draws` >= 1, got 0"),
        ({"warm_up": 0}, "`warm_up` >= 1, got 0"),
        ({"chains": 0}, "`chains` >= 1, got 0"),
        ({"thin": 0}, "`thin` >= 1, got 0"),
        ({"max_tree_depth": 0}, "`max_tree_depth` >= 1, got 0"),
        ({"draws": 10, "chains": 3}, "multiple of `chains`, got 10 and 3; ask for 12"),
        ({"target_accept": 1.0}, "`target_accept` between 0 and 1, got 1.0"),
        ({"target_accept": math.nan}, "`target_accept` between 0 and 1, got nan"),
        ({"prior_scale": 0.0}, "`prior_scale`"),
        ({"aware": "head.*"}, "`aware` to match parameter names"),
    ],
)
def test_bad_options_are_refused(options, message):
    x, y, _, _ = line()
    with pytest.raises(ValueError, match=message):
        hmc.fit(linear(), Gaussian(0.5), (x, y), **options)


@pytest.mark.parametrize(
    ("model", "likelihood", "data", "error", "message"),
    [
        (linear().requires_grad_(False), Gaussian(), (torch.ones(4, 2), torch.ones(4)), ValueError, "unfreeze some"),
        (linear(), Bernoulli(), (torch.ones(4, 2), torch.full((4,), 2)), ValueError, "labels between 0 and 1"),
        (linear(), Gaussian(), (torch.ones(4, 2), torch.ones(3)), ValueError, "4 inputs and 3 targets"),
        (linear(), Gaussian(), torch.ones(4, 2), TypeError, "`train` as"),
        (nn.LSTM(2, 3), Gaussian(), (torch.ones(4, 2), torch.ones(4)), TypeError, "return a tensor .* got tuple"),
        (linear(), Gaussian(), (torch.full((4, 2), 3e38) * 2, torch.ones(4)), ValueError, "NaN or inf in 4 of 4 rows"),
        (
            linear(),
            Gaussian(),
            (torch.full((4, 2), 1e38), torch.ones(4)),
            ValueError,
            "log joint at the model's weights",
        ),
        (
            nn.Sequential(nn.Unflatten(1, (2, 1)), linear(1)),
            Gaussian(),
            (torch.ones(4, 2), torch.ones(4)),
            ValueError,
            r"return \(N, C\) for N inputs, got \(4, 2, 1\)",
        ),
    ],
)
def test_bad_models_and_data_are_refused(model, likelihood, data, error, message):
    with pytest.raises(error, match=message):
        hmc.fit(model, likelihood, data, **QUICK)
