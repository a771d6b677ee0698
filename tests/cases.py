"""Cases that several test files run through."""

from __future__ import annotations

import torch
from torch import nn

from dapcal.adjust import Inflate, Reweight, SelfNormalised, Transport
from dapcal.posteriors import gaussian

ADJUSTMENTS = {
    "inflate": Inflate(),
    "drawn": Inflate(drawn=True),
    "reweight": Reweight(),
    "self-normalised": Reweight(SelfNormalised()),
    "normalise": Reweight(normalise=True),
    "complete": Reweight(complete=True),
    "smooth": Reweight(smooth=True),
    "transport": Transport(),
    "shift": Transport(shift=True),
}


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def network_posterior(likelihood, outputs, draws=30, scale=0.2):
    """A diagonal Gaussian over a network of 18 + 7 · outputs parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs))
    deviations = {n: torch.full_like(p, scale) for n, p in model.named_parameters()}
    return gaussian.diagonal(model, likelihood, deviations, draws=draws)


def inputs(n):
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(3))
