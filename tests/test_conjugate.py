"""Posteriors against exact answers: a conjugate linear regression, and a logistic regression sampled by NUTS.

In a linear regression with known noise s and prior N(0, σ0² I) the posterior is N(μ, Λ⁻¹) with Λ = XᵀX/s² + I/σ0² and
μ = Λ⁻¹ Xᵀy/s². The best independent Gaussians have the same mean and variances 1/Λ_ii. A distance d turns σ0 into
σ0 + d and nothing else, so that the distance-aware posterior is exact too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from arviz_stats.base import array_stats
from torch import Tensor, nn

from cases import KnownNoise
from dapcal.adjust import ClosedForm, Inflate, Reweight, SelfNormalised, Transport
from dapcal.ensembles import seen
from dapcal.likelihoods import Bernoulli
from dapcal.posteriors import hmc, laplace, sgmcmc, swag, variational, vogn
from dapcal.posteriors import map as map_posterior
from dapcal.posteriors.network import NetworkPosterior

NOISE, SIGMA0, N = 0.5, 1.5, 60


class Line(NamedTuple):
    """Training data with their exact posterior over (weight, weight, bias), in float64."""

    x: Tensor  # (N, 2)
    y: Tensor  # (N,)
    mean: Tensor  # (3,)
    precision: Tensor  # (3, 3)


def with_bias(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones(len(x), 1).to(x)], 1)


def exact(x: Tensor, y: Tensor, sigma0: float) -> tuple[Tensor, Tensor]:
    """μ and Λ."""
    rows = with_bias(x)
    precision = rows.T @ rows / NOISE**2 + torch.eye(3).to(x) / sigma0**2
    return torch.linalg.solve(precision, rows.T @ y / NOISE**2), precision


@functools.cache
def line() -> Line:
    """Two inputs with correlation 0.5, away from the origin."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 2, generator=generator, dtype=torch.float64)
    x[:, 1] = 0.5 * x[:, 0] + 0.75**0.5 * x[:, 1] + 0.5
    y = x @ torch.tensor([1.0, -0.5]).double() + 0.3 + NOISE * torch.randn(N, generator=generator, dtype=torch.float64)
    return Line(x, y, *exact(x, y, SIGMA0))


def trained(copies: int = 1, away: float = 0.0) -> nn.Module:
    """The exact posterior mean as a network, so many times side by side; or away from it."""
    model = nn.Linear(2, copies).double()
    with torch.no_grad():
        model.weight.copy_(line().mean[:2] + away)
        model.bias.copy_(line().mean[2] - away)
    return model


AWAY = 0.5  # seven posterior standard deviations: what learns the mean does not start there


def new_inputs() -> Tensor:
    return 3 * torch.randn(20, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def fit_laplace(method: Callable[..., NetworkPosterior], **options) -> NetworkPosterior:
    x, y, _, _ = line()
    model = nn.Sequential(nn.Identity(), trained())
    return method(model, KnownNoise(NOISE), (x, y), prior_scale=SIGMA0, draws=4000, **options)


def fit_one(fit: Callable[..., NetworkPosterior], **options) -> NetworkPosterior:
    x, y, _, _ = line()
    return fit(trained(1, AWAY), KnownNoise(NOISE), (x, y), prior_scale=SIGMA0, draws=4000, **options)


def fit_chains(fit: Callable[..., NetworkPosterior], copies: int, **options) -> NetworkPosterior:
    """One run over copies of the regression that share nothing: as many chains."""
    x, y, _, _ = line()
    targets = y[:, None].repeat(1, copies)
    return fit(trained(copies, AWAY), KnownNoise(NOISE), (x, targets), prior_scale=SIGMA0, **options)


class Method(NamedTuple):
    """How it is fitted, which covariance it aims at, and how far its draws may be from that.

    `mean` is in posterior standard deviations, `variance` relative: 4 standard errors of the effective number of draws,
    and what the method itself is off by.
    """

    fit: Callable[[], NetworkPosterior]
    covariance: str | None  # "full", "independent", or None where it aims at another one
    mean: float
    variance: float = math.nan
    burn_in: int = 0


ADAM = {"epochs": 400, "learning_rate": 0.03, "batch_size": N}
LANGEVIN = {"cycles": 1, "exploration": 0.0, "draws": 100, "epochs": 600, "batch_size": N, "learning_rate": 0.02}
FIT, LAST = laplace.fit, laplace.last_layer
METHODS = {
    # 4000 independent draws: 4/√4000 = 0.06 and 4 √(2/4000) = 0.09
    "laplace full": Method(lambda: fit_laplace(FIT, structure=laplace.Full), "full", 0.06, 0.09),
    "laplace kronecker": Method(lambda: fit_laplace(FIT, structure=laplace.Kronecker), "full", 0.06, 0.09),
    "laplace diagonal": Method(lambda: fit_laplace(FIT, structure=laplace.Diagonal), "independent", 0.06, 0.09),
    "last layer full": Method(lambda: fit_laplace(LAST, structure=laplace.Full), "full", 0.06, 0.09),
    "last layer kronecker": Method(lambda: fit_laplace(LAST, structure=laplace.Kronecker), "full", 0.06, 0.09),
    "last layer diagonal": Method(lambda: fit_laplace(LAST, structure=laplace.Diagonal), "independent", 0.06, 0.09),
    # and noise of the gradients of finitely many steps
    "variational": Method(lambda: fit_one(variational.fit, samples=8, **ADAM), "independent", 0.15, 0.2),
    "flipout": Method(lambda: fit_one(variational.fit, flipout=True, samples=4, **ADAM), "independent", 0.15, 0.2),
    "vogn": Method(lambda: fit_one(vogn.fit, epochs=300, batch_size=20), None, 0.2),  # variances: test_vogn.py
    "swag": Method(lambda: fit_one(swag.fit, epochs=200, batch_size=20, learning_rate=0.002), None, 0.05),
    # the last 40 draws of 500 chains, about 2 independent ones each, and 2 % from the length of steps
    "sgld": Method(lambda: fit_chains(sgmcmc.sgld, 500, **LANGEVIN), "full", 0.14, 0.22, 60),
    "sghmc": Method(lambda: fit_chains(sgmcmc.sghmc, 500, friction=0.2, **LANGEVIN), "full", 0.14, 0.22, 60),
    "nuts": Method(lambda: fit_chains(hmc.fit, 20, draws=100, warm_up=60), "full", 0.09, 0.13),  # 2000 draws
}


@functools.cache
def fitted(name: str) -> NetworkPosterior:
    return METHODS[name].fit()


def target(name: str) -> Tensor:
    precision = line().precision
    if METHODS[name].covariance == "full":
        return torch.linalg.inv(precision)
    return torch.diag(1 / precision.diagonal())


def variance_at(x: Tensor, covariance: Tensor) -> Tensor:
    """diag(φ Σ φᵀ)."""
    rows = with_bias(x)
    return torch.einsum("ni,ij,nj->n", rows, covariance, rows)


@pytest.mark.parametrize("name", METHODS)
def test_predictions_are_those_of_the_exact_posterior(name):
    """Mean and variance over all draws at new inputs."""
    method, posterior, x = METHODS[name], fitted(name), new_inputs()
    outputs = posterior.outputs_at(posterior.draws[method.burn_in :], x)
    found = outputs.transpose(1, 2).flatten(0, 1)  # (draws and copies, N)
    deviation = variance_at(x, torch.linalg.inv(line().precision)).sqrt()
    assert ((found.mean(0) - with_bias(x) @ line().mean).abs() < method.mean * deviation).all()
    if method.covariance is not None:
        torch.testing.assert_close(found.var(0), variance_at(x, target(name)), rtol=method.variance, atol=0)


LINEAR = [name for name in METHODS if name.startswith(("laplace", "last"))]
EXACT = [name for name in LINEAR if METHODS[name].covariance == "full"]


@pytest.mark.parametrize("name", LINEAR)
def test_closed_forms_are_exact(name):
    """The predictive distribution is N(φᵀμ, φᵀΣφ + s²)."""
    posterior, x = fitted(name), new_inputs()
    base = seen(posterior, x)
    likelihood = posterior.likelihood
    torch.testing.assert_close(likelihood.mean(base)[:, 0], with_bias(x) @ line().mean)
    torch.testing.assert_close(likelihood.variance(base)[:, 0], variance_at(x, target(name)) + NOISE**2)


def test_independent_gaussians_have_the_variances_of_the_precision():
    """σ_i² = 1/Λ_ii, which is less than the marginal variance of each parameter by 25 % at least."""
    marginal = torch.linalg.inv(line().precision).diagonal()
    independent = 1 / line().precision.diagonal()
    assert (independent < 0.75 * marginal).all()
    for name in ("variational", "flipout"):
        own = fitted(name).gaussian
        torch.testing.assert_close(own.variance, independent, rtol=0.2, atol=0)
        assert (own.variance < 0.95 * marginal).all()
        assert ((own.mean - line().mean).abs() < 0.15 * marginal.sqrt()).all()


# A distance widens the prior: the posterior under the wider prior is known too.

DISTANCES = (0.1, 1.0, 30.0, 1e5)


def at_distance(d: float) -> tuple[Tensor, Tensor]:
    """μ_d and Σ_d: the exact posterior under N(0, (σ0 + d)² I)."""
    mean, precision = exact(line().x, line().y, SIGMA0 + d)
    return mean, torch.linalg.inv(precision)


@pytest.mark.parametrize("name", EXACT)
def test_transport_gives_the_posterior_under_the_wider_prior(name):
    posterior, x = fitted(name), new_inputs()
    closed = Transport()(posterior, x)
    for d in DISTANCES:
        mean, covariance = at_distance(d)
        spread = closed(torch.full((len(x),), d).double()).spread[:, 0]
        torch.testing.assert_close(spread, variance_at(x, covariance), rtol=1e-8, atol=0)
        c = posterior.prior.precision_drop(torch.tensor([d]).double())[0]
        moved = posterior.gaussian.transport(posterior.center[None], c, posterior.prior, True)
        torch.testing.assert_close(moved[0], mean, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", EXACT)
def test_drawn_transport_has_the_moments_of_the_posterior_under_the_wider_prior(name):
    """4000 draws: within 4/√4000 standard deviations, and 4 √(2/4000) of the variance."""
    posterior, x = fitted(name), new_inputs()
    for d in DISTANCES:
        mean, covariance = at_distance(d)
        variance = variance_at(x, covariance)
        outputs = Transport(shift=True, step=None)(posterior, x)(torch.full((len(x),), d)).outputs[:, :, 0]
        assert ((outputs.mean(0) - with_bias(x) @ mean).abs() < 0.065 * variance.sqrt()).all()
        torch.testing.assert_close(outputs.var(0), variance, rtol=0.09, atol=0)


def log_evidence(sigma0: float) -> Tensor:
    """log p(y | x) = log p(y | θ, x) + log p(θ) − log p(θ | y, x), whatever θ is: the posterior mean."""
    x, y, _, _ = line()
    mean, precision = exact(x, y, sigma0)
    likelihood = -((y - with_bias(x) @ mean) ** 2 / NOISE**2 + math.log(2 * math.pi * NOISE**2)).sum() / 2
    prior = -(mean**2 / sigma0**2 + math.log(2 * math.pi * sigma0**2)).sum() / 2
    return likelihood + prior - (torch.logdet(precision) - 3 * math.log(2 * math.pi)) / 2


@pytest.mark.parametrize("name", EXACT)
def test_the_normaliser_is_the_ratio_of_evidences(name):
    """log Z = log p(y | σ0 + d) − log p(y | σ0) + n log((σ0 + d)/σ0)."""
    d = torch.tensor([0.0, *DISTANCES]).double()
    expected = [log_evidence(SIGMA0 + float(v)) - log_evidence(SIGMA0) + 3 * torch.log1p(v / SIGMA0) for v in d]
    torch.testing.assert_close(ClosedForm()(fitted(name))(d), torch.stack(expected), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("normaliser", [ClosedForm(), SelfNormalised()], ids=repr)
def test_weighted_draws_have_the_mean_of_the_posterior_under_the_wider_prior(normaliser):
    """Data speak louder than the prior here, so that weights stay even."""
    posterior, x = fitted("laplace full"), new_inputs()
    for d in DISTANCES:
        mean, covariance = at_distance(d)
        found = Reweight(normaliser)(posterior, x)(torch.full((len(x),), d))
        weights = found.log_weights.exp()
        assert float(1 / (weights / weights.sum(0)).square().sum(0).min()) > 3900  # effective draws
        off = torch.einsum("sn,sn->n", weights, found.outputs[:, :, 0]) - with_bias(x) @ mean
        assert (off.abs() < 0.07 * variance_at(x, covariance).sqrt()).all()


@pytest.mark.parametrize("name", METHODS)
def test_inflate_multiplies_the_variance_of_every_method(name):
    """k² times its own variance, which bounds that of the posterior under the wider prior."""
    posterior, x = fitted(name), new_inputs()
    for d in DISTANCES[:3]:
        adjusted = Inflate(drawn=True)(posterior, x)
        base, wide = (adjusted(torch.full((len(x),), v)).outputs.var(0) for v in (0.0, d))
        k = (SIGMA0 + d) / SIGMA0
        torch.testing.assert_close(wide, k**2 * base)


# A logistic regression of three parameters, against NUTS.


@dataclass(frozen=True)
class Flips(Bernoulli):
    """Regressions side by side on the same labels: each output is a logit of its own."""

    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        return nn.functional.logsigmoid(outputs * (2 * y[:, None] - 1)).sum(-1)

    def check(self, outputs: Tensor, y: Tensor) -> Tensor:  # noqa: ARG002
        return y


@functools.cache
def flips() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(80, 2, generator=generator, dtype=torch.float64)
    x[:, 1] = 0.4 * x[:, 0] + x[:, 1]
    logits = x @ torch.tensor([1.2, -0.8]).double() + 0.4
    return x, (torch.rand(80, generator=generator, dtype=torch.float64) < logits.sigmoid()).long()


@functools.cache
def mode() -> nn.Module:
    """The MAP."""
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 1).double())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return map_posterior.fit(
        model, Bernoulli(), flips(), prior_scale=2.0, epochs=300, batch_size=80, learning_rate=0.05
    ).network


def approximate(fit: Callable[..., NetworkPosterior], **options) -> Tensor:
    """Draws (S, 3) of a Gaussian."""
    posterior = fit(mode(), Bernoulli(), flips(), prior_scale=2.0, **options)
    return posterior.gaussian.sample(20_000, torch.Generator().manual_seed(0))


def chains(fit: Callable[..., NetworkPosterior], copies: int, **options) -> Tensor:
    """Draws (copies, S, 3) of chains that start at the MAP."""
    model, found = nn.Linear(2, copies).double(), mode()[1]
    with torch.no_grad():
        model.weight.copy_(found.weight)
        model.bias.copy_(found.bias)
    posterior = fit(model, Flips(), flips(), prior_scale=2.0, **options)
    own = posterior.layout.unflatten(posterior.draws)
    return torch.cat([own["weight"], own["bias"][..., None]], -1).transpose(0, 1)


class Reference(NamedTuple):
    """Moments of the draws of NUTS, and how many independent draws they are worth."""

    mean: Tensor  # (3,)
    covariance: Tensor  # (3, 3)
    effective: float


@functools.cache
def reference() -> Reference:
    draws = chains(hmc.fit, 25, draws=80, warm_up=60)
    effective = min(float(array_stats.ess(draws[..., i].numpy(), method="mean")) for i in range(3))
    flat = draws.flatten(0, 1)
    return Reference(flat.mean(0), flat.T.cov(), effective)


class Approximation(NamedTuple):
    """How draws are made, and how far they may be from the posterior beyond the Monte Carlo error of NUTS.

    `mean` is in posterior standard deviations, `deviation` the lowest and highest ratio of standard deviations.
    """

    draws: Callable[[], Tensor]
    mean: float
    deviation: tuple[float, float]
    independent: bool = False  # aims at the deviation of each parameter given the others


def late_draws(fit: Callable[..., NetworkPosterior], learning_rate: float) -> Tensor:
    """The last 40 draws of 500 chains."""
    slow = {"cycles": 1, "exploration": 0.0, "draws": 100, "epochs": 600, "batch_size": 80}
    return chains(fit, 500, learning_rate=learning_rate, **slow)[:, 60:].flatten(0, 1)


LOGISTIC = {
    # the mode is not the mean, and one factor for all inputs is not the curvature of a likelihood that saturates
    "laplace full": Approximation(lambda: approximate(FIT, structure=laplace.Full), 0.25, (0.9, 1.1)),
    "laplace kronecker": Approximation(lambda: approximate(FIT, structure=laplace.Kronecker), 0.25, (0.7, 1.1)),
    "last layer": Approximation(lambda: approximate(LAST), 0.25, (0.9, 1.1)),
    "variational": Approximation(lambda: approximate(variational.fit, samples=8, **ADAM), 0.1, (0.9, 1.1), True),
    "flipout": Approximation(
        lambda: approximate(variational.fit, flipout=True, samples=4, **ADAM), 0.1, (0.9, 1.1), True
    ),
    "vogn": Approximation(lambda: approximate(vogn.fit, epochs=400, batch_size=80), 0.15, (0.85, 1.15), True),
    # some 500 independent draws: 4/√500 = 0.18 and 4/√1000 = 0.13
    "sgld": Approximation(lambda: late_draws(sgmcmc.sgld, 0.3), 0.18, (0.87, 1.13)),
    "sghmc": Approximation(lambda: late_draws(sgmcmc.sghmc, 0.1), 0.18, (0.87, 1.13)),
}


def test_nuts_has_mixed():
    assert reference().effective > 1000


@pytest.mark.parametrize("name", LOGISTIC)
def test_a_logistic_regression_agrees_with_nuts(name):
    mean, covariance, effective = reference()
    case = LOGISTIC[name]
    draws, deviation = case.draws(), covariance.diag().sqrt()
    off = (draws.mean(0) - mean).abs() / deviation
    ratio = draws.std(0) / (torch.linalg.inv(covariance).diag().rsqrt() if case.independent else deviation)
    low, high = case.deviation
    error = 4 / math.sqrt(2 * effective)
    assert (off < case.mean + 4 / math.sqrt(effective)).all()
    assert ((ratio > low * (1 - error)) & (ratio < high * (1 + error))).all()
