"""Counts with uncertain rates: moments by Monte Carlo, densities and quantiles by scipy, and through calibrate."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import dapcal
from dapcal.adjust import Inflate, Revert, Transport
from dapcal.data import Labelled
from dapcal.ensembles import base_ensemble, seen
from dapcal.likelihoods import Poisson
from dapcal.likelihoods.counts import log_negative_binomial, quantile
from dapcal.models import network_fitting
from dapcal.posteriors import laplace
from dapcal.posteriors.plain import likelihood_for
from dapcal.report import write

pytestmark = pytest.mark.filterwarnings("ignore::dapcal.types.DapcalWarning")

S, N = 4, 3


def weighted(spread: float = 0.0):
    generator = torch.Generator().manual_seed(0)
    outputs = 1 + 0.6 * torch.randn(S, N, 2, generator=generator)
    weights = torch.rand(S, N, generator=generator, dtype=torch.float64)
    weights = weights / weights.sum(0)
    wide = torch.full((N, 2), spread, dtype=torch.float64)
    return base_ensemble(Poisson(), outputs)._replace(log_weights=weights.log(), spread=wide), weights


def test_one_draw_against_torch():
    found, _ = weighted()
    y = torch.tensor([[0.0, 3.0], [2.0, 0.0], [7.0, 1.0]])
    expected = torch.distributions.Independent(torch.distributions.Poisson(found.outputs.double().exp()), 1)
    torch.testing.assert_close(Poisson().log_likelihood(found.outputs.double(), y), expected.log_prob(y.double()))
    mixture = torch.logsumexp(found.log_weights + expected.log_prob(y.double()), 0)
    torch.testing.assert_close(Poisson().log_prob_mixture(found, y), mixture)
    root = Poisson().curvature_root(found.outputs[0].double())
    for row in range(N):
        hessian = torch.autograd.functional.hessian(
            lambda z, row=row: -Poisson().log_likelihood(z[None], y[[row]]).sum(), found.outputs[0, row].double()
        )
        torch.testing.assert_close(root[row] @ root[row].T, hessian)


@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_moments_are_those_of_gamma_rates(spread, generator):
    found, weights = weighted(spread)
    n = 100_000
    draw = torch.multinomial(weights.T, n, replacement=True, generator=generator).T  # (n, N)
    factor = np.random.default_rng(0).gamma(1 / max(spread, 1e-9), max(spread, 1e-9), (n, N, 2))  # of mean one
    rates = found.conditional.mean[draw, torch.arange(N)] * torch.from_numpy(factor)
    counts = torch.poisson(rates, generator=generator)
    torch.testing.assert_close(Poisson().mean(found), counts.mean(0), rtol=0.01, atol=0)
    torch.testing.assert_close(Poisson().variance(found), counts.var(0), rtol=0.05, atol=0)
    split = Poisson().split(found, found)
    torch.testing.assert_close(split.aleatoric, rates.mean(0), rtol=0.01, atol=0)


def test_negative_binomial_against_scipy():
    mean = torch.tensor([1e-3, 0.7, 4.0, 50.0, 1e4], dtype=torch.float64)[:, None]
    for excess in (0.0, 1e-12, 1e-7, 1e-3, 0.5, 30.0):
        variance = mean + excess * mean**2
        y = torch.tensor([0.0, 1.0, 5.0, 60.0, 9900.0], dtype=torch.float64).expand(5, 5)
        size = 1 / max(excess, 1e-300)
        law = stats.nbinom(size, 1 / (1 + mean * excess)) if excess > 1e-9 else stats.poisson(mean)
        expected = torch.from_numpy(law.logpmf(y))
        torch.testing.assert_close(log_negative_binomial(y, mean, variance), expected, rtol=1e-5, atol=1e-4)
        level = torch.full_like(mean, 0.9)
        np.testing.assert_array_equal(quantile(level, mean, variance), law.ppf(0.9))


def test_intervals_and_samples(generator):
    found, _ = weighted(0.3)
    drawn = Poisson().sample(found, 4000, generator)
    mean, variance = Poisson().mean(found), Poisson().variance(found)
    torch.testing.assert_close(drawn.mean(0), mean, rtol=0.1, atol=0)
    torch.testing.assert_close(drawn.var(0), variance, rtol=0.2, atol=0)
    lower, upper = Poisson().interval(found, 0.8)
    inside = ((drawn >= lower) & (drawn <= upper)).double().mean(0)
    assert (inside > 0.78).all()
    assert (((drawn > lower) & (drawn < upper)).double().mean(0) < 0.8).all()
    place = Poisson().place_of(mean, variance, drawn)
    torch.testing.assert_close(place.mean(0), torch.full_like(mean, 0.5), atol=0.03, rtol=0)


def test_distance_keeps_the_mean_and_widens_up_to_the_limit():
    found, _ = weighted()
    posterior = dapcal.posteriors.predictions.StackedPredictions(lambda _: found.outputs, Poisson())
    y = torch.tensor([[0.0, 40.0], [9.0, 0.0], [2.0, 5.0], [1.0, 1.0]])
    adjust = Inflate().fitted(Poisson(), y)
    at = adjust(posterior, torch.zeros(N, 1))
    ensembles = [at(torch.full((N,), d)) for d in (0.0, 0.5, 3.0, 1e6)]
    base = base_ensemble(Poisson(), found.outputs)
    assert torch.equal(Poisson().variance(ensembles[0]), Poisson().variance(base))
    variances = torch.stack([Poisson().variance(e) for e in ensembles])
    assert (variances.diff(dim=0) >= 0).all()
    assert all(torch.equal(Poisson().mean(e), Poisson().mean(base)) for e in ensembles)
    limit = adjust.limit.variance_around(Poisson().mean(base))
    torch.testing.assert_close(variances[-1], torch.maximum(limit, variances[0]))
    unlimited = Inflate(limit=None)(posterior, torch.zeros(N, 1))(torch.full((N,), 1e6))
    assert Poisson().log_prob(unlimited, y[:N]).isfinite().all()


@functools.cache
def problem(n: int = 200) -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x = torch.randn(2 * n, 2)
        y = torch.poisson((0.8 + 0.6 * x[:, 0] - 0.4 * x[:, 1]).exp()).long()
        network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(network.parameters(), 0.03)
        for _ in range(80):
            loss = nn.functional.poisson_nll_loss(network(x[:n])[:, 0], y[:n].float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return network, (x[:n], y[:n]), (x[n:], y[n:])


def test_a_network_of_counts_is_calibrated(tmp_path):
    network, train, held_out = problem()
    with pytest.raises(ValueError, match=r"for counts give Poisson\(\) if the output is the log of a rate"):
        likelihood_for(network, Labelled(*train))
    own = dapcal.calibrate(network, Poisson(), train=train, held_out=held_out)
    assert own.summary().calibrated.nll <= own.summary().network.nll + 0.05
    assert own.summary().calibrated.coverage > 0.9
    x = torch.cat([train[0][:8], torch.full((1, 2), 30.0)])
    prediction = own(x)
    assert prediction.ood_p_value[-1] < 0.05
    away = own(torch.tensor([[2.2, 2.2], [-2.5, 1.5], [3.0, -3.0]]))
    assert (away.variance[away.distance > 0] > away.base.variance[away.distance > 0]).any()
    columns = prediction.columns()
    assert (columns["lower"] == columns["lower"].round()).all()
    own.save(tmp_path / "m.dap")
    assert torch.equal(dapcal.load(tmp_path / "m.dap", network)(x).variance, prediction.variance)
    deployed = own.module()(x)
    torch.testing.assert_close(deployed.variance, prediction.variance, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(deployed.ood_score, prediction.ood_score, rtol=1e-4, atol=1e-4)
    with pytest.raises(TypeError, match="no predictive entropy; use the variance"):
        _ = prediction.entropy
    with pytest.raises(TypeError, match=r"does not say how outputs shift .*Inflate\(\)"):
        dapcal.calibrate(network, Poisson(), train=train, held_out=held_out, adjust=Revert())
    with pytest.raises(TypeError, match="no in-domain calibration; use temperature=False"):
        dapcal.calibrate(network, Poisson(), train=train, held_out=held_out, temperature=True)


def test_closed_form_and_draws_of_a_last_layer_agree():
    network, train, _ = problem()
    train = (train[0], Poisson().check(torch.zeros(200, 1), train[1]))
    posterior = laplace.last_layer(network, Poisson(), train, prior_scale=1.0, draws=4000)
    x = train[0][:5]
    closed, many = seen(posterior, x), seen(posterior, x, drawn=True)
    torch.testing.assert_close(Poisson().mean(closed), Poisson().mean(many), rtol=0.03, atol=0)
    torch.testing.assert_close(Poisson().variance(closed), Poisson().variance(many), rtol=0.05, atol=0)
    wider = Transport()(posterior, x)(torch.full((5,), 3.0))
    assert (Poisson().variance(wider) > Poisson().variance(closed)).all()


def test_an_ensemble_and_a_report_of_counts(tmp_path):
    network, train, held_out = problem()
    other = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    other.load_state_dict({name: 1.05 * value for name, value in network.state_dict().items()})
    model = network_fitting.fit([network, other], Labelled(*train), Labelled(*held_out), task="counts")
    assert model.calibrated.posterior.likelihood == Poisson()
    write(model.subject("counts.dap"), tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "CRPS" not in page
    assert "targets inside" in page


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.tensor([1.5, 2.0]), "negative numbers or fractions; for those use Gaussian"),
        (torch.tensor([-1, 2]), "negative numbers"),
        (torch.tensor([torch.nan, 2.0]), "finite counts"),
        (torch.zeros(2, 3), r"counts of shape \(2, 1\).*got \(2, 3\)"),
    ],
)
def test_targets_that_are_not_counts(y, message):
    with pytest.raises(ValueError, match=message):
        Poisson().check(torch.zeros(2, 1), y)
