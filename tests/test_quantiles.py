"""Quantiles as a location and a noise: exact for a Gaussian, and through calibrate."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dapcal
from dapcal.data import Labelled
from dapcal.likelihoods import FromQuantiles, NoiseHead
from dapcal.posteriors import ensemble
from dapcal.posteriors.plain import likelihood_for

pytestmark = pytest.mark.filterwarnings("ignore::dapcal.types.DapcalWarning")

LEVELS = (0.05, 0.5, 0.8)


class Exact(nn.Module):
    """Quantiles of N(x0, (1 + x1²)²)."""

    def forward(self, x):
        normal = torch.distributions.Normal(x[:, :1], 1 + x[:, 1:] ** 2)
        return normal.icdf(torch.tensor(LEVELS).expand(len(x), -1))


def test_quantiles_of_a_gaussian_give_it_back():
    x = torch.randn(6, 2)
    found = NoiseHead().conditional(FromQuantiles(Exact(), LEVELS)(x)[None])
    torch.testing.assert_close(found.mean[0].float(), x[:, :1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.variance[0].float(), (1 + x[:, 1:] ** 2) ** 2, atol=1e-4, rtol=1e-3)


def test_quantiles_that_cross_have_the_smallest_noise():
    crossed = FromQuantiles(nn.Identity(), (0.1, 0.9))(torch.tensor([[1.0, -1.0]]))
    assert NoiseHead().conditional(crossed[None]).variance.sqrt().item() == pytest.approx(1e-3, rel=0.01)
    assert crossed.isfinite().all()


def test_networks_of_quantiles_are_calibrated():
    x = torch.randn(240, 2)
    y = x[:, :1] + 0.5 * torch.randn(240, 1)
    networks = []
    for _ in range(2):
        inner = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.Adam(inner.parameters(), 0.03)
        levels = torch.tensor(LEVELS)
        for _ in range(60):
            error = y[:120] - inner(x[:120])
            loss = torch.maximum(levels * error, (levels - 1) * error).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        networks.append(inner)
    train, held_out = (x[:120], y[:120]), (x[120:], y[120:])
    with pytest.raises(
        ValueError, match=r"quantiles become a location and a noise by FromQuantiles\(network, levels\)"
    ):
        likelihood_for(networks[0], Labelled(*train))
    posterior = ensemble.of([FromQuantiles(one, LEVELS) for one in networks], NoiseHead())
    calibrated = dapcal.calibrate(posterior, train=train, held_out=held_out)
    assert calibrated.summary().calibrated.coverage > 0.85
    alone = dapcal.calibrate(FromQuantiles(networks[0], LEVELS), NoiseHead(), train=train, held_out=held_out)
    expected = NoiseHead().conditional(FromQuantiles(networks[0], LEVELS)(x[:5])[None]).mean[0]
    torch.testing.assert_close(alone(x[:5]).mean.double(), expected, atol=1e-4, rtol=1e-4)


def test_levels_and_columns_that_make_no_sense():
    for levels in ((0.5,), (0.5, 0.5), (0.0, 0.5)):
        with pytest.raises(ValueError, match="at least 2 different `levels` between 0 and 1"):
            FromQuantiles(nn.Identity(), levels)
    with pytest.raises(ValueError, match=r"return \(N, 2\), a quantile for every level, got \(4, 3\)"):
        FromQuantiles(nn.Identity(), (0.1, 0.9))(torch.zeros(4, 3))
