"""Noise by the row, fitted to held-out residuals, where it says more of them than one noise level does."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.calibration.in_domain import with_likelihood
from dapcal.data import Labelled
from dapcal.likelihoods import Gaussian, VaryingNoise, log_normal, places
from dapcal.posteriors.network import NetworkPosterior
from dapcal.posteriors.trees import TreePosterior
from dapcal.types import Posterior

FEWEST = 30  # held-out rows
KNOTS = (0.05, 0.275, 0.5, 0.725, 0.95)  # quantiles of the predictions
STIFFNESS = 16.0  # 1/variance of the prior on changes of log noise: few rows change it little
_LEAST_NOISE = 0.05  # share of the residuals' variance that is noise, whatever members say of themselves
_LEAST = 1e-6  # standard deviations of the target that draws count as apart, at least


def with_row_noise(posterior: Posterior, rows: Labelled) -> tuple[Posterior, str | None]:
    """The posterior with noise that depends on the row, and a note; unchanged where one level says as much.

    log noise is a function of the prediction (piecewise linear over `KNOTS`) and of how far the members are apart,
    fitted by penalised likelihood. Two halves of the rows: each is scored by what was fitted to the other, and the mean
    gain over one level must exceed its standard error. Few rows that training has not seen are enough for six numbers;
    a noise head learnt along with the network costs it accuracy (concrete: RMSE +6 to +11 %).

    Args:
        posterior: members with one noise level.
        rows: held-out rows that choose.
    """
    likelihood = posterior.likelihood
    by_members = isinstance(posterior, TreePosterior) or (
        isinstance(posterior, NetworkPosterior) and not posterior.linear
    )
    if not (by_members and isinstance(likelihood, Gaussian)):
        return posterior, None
    seen = _seen(posterior.outputs(rows.x), rows.y)
    if len(seen.squared) < FEWEST or seen.shape.shape[1] < 3:
        return posterior, None
    gain = _by_other_half(seen, varying=True) - _by_other_half(seen, varying=False)
    if not gain.mean() > gain.std() / math.sqrt(len(gain)):
        return posterior, None
    found = _fitted(seen, True).tolist()
    changed = VaryingNoise(
        noise=math.exp(found[0]), knots=seen.knots, heights=tuple(found[1:-1]), slope=found[-1], apart=seen.apart
    )
    spread = changed._location_and_noise(posterior.outputs(rows.x).double())[1].flatten()
    low, high = (float(spread.quantile(q)) for q in (0.1, 0.9))
    told = (
        f"noise depends on the row: it is {high / low:.1f} times as large at the 90 % as at the 10 % quantile of rows"
    )
    return with_likelihood(posterior, changed), told


def beyond_spread(likelihood: Gaussian, outputs: Tensor, y: Tensor) -> Gaussian:
    """As much noise as residuals have beyond the members' spread."""
    squared = (outputs.mean(0) - y).double().square().mean().clamp_min(_LEAST**2)
    spread = outputs.double().var(0, correction=0).mean()
    return replace(likelihood, noise=float(torch.maximum(squared - spread, _LEAST_NOISE * squared).sqrt()))


def log_prob_by_halves(prediction: Tensor, y: Tensor) -> Tensor:
    """log N(y; prediction, noise by the row), (N,) each; every other row says the noise of the rest."""
    return _by_other_half(_seen(prediction[None, :, None], y[:, None]), varying=True)


def _by_other_half(seen: _Seen, varying: bool) -> Tensor:
    """Log-likelihood of each row under noise that is fitted to the other half of them, (n,)."""
    even = torch.arange(len(seen.squared)) % 2 == 0
    found = torch.empty_like(seen.squared)
    for one, other in ((even, ~even), (~even, even)):
        found[other] = _log_prob(seen.at(other), _fitted(seen.at(one), varying))
    return found


class _Seen(NamedTuple):
    """What held-out rows say of the noise."""

    squared: Tensor  # (n,) residuals
    variance: Tensor  # (n,) between members
    shape: Tensor  # (n, J + 2): one, places between knots, log of how far members are apart
    knots: tuple[float, ...]
    apart: tuple[float, float, float]

    def at(self, rows: Tensor) -> _Seen:
        return self._replace(squared=self.squared[rows], variance=self.variance[rows], shape=self.shape[rows])


def _seen(outputs: Tensor, y: Tensor) -> _Seen:
    draws = outputs.double().cpu()[..., 0]  # (S, n)
    mean, deviation = draws.mean(0), draws.std(0, correction=0).clamp_min(_LEAST)
    knots = tuple(mean.quantile(torch.tensor(KNOTS).to(mean)).unique().tolist())
    typical = float(deviation.log().mean().exp())
    apart = (typical, float(deviation.min()), float(deviation.max()))
    columns = [torch.ones(len(mean), 1).to(mean), places(mean, knots), (deviation / typical).log()[:, None]]
    return _Seen((y.cpu()[:, 0].double() - mean).square(), deviation**2, torch.cat(columns, 1), knots, apart)


def _log_prob(seen: _Seen, parameters: Tensor) -> Tensor:
    noise = (2 * (seen.shape @ parameters)).exp()
    return log_normal(seen.squared.sqrt(), torch.zeros(()).to(noise), noise + seen.variance)


def _fitted(seen: _Seen, varying: bool) -> Tensor:
    """Level, heights and slope, (J + 2,); all but the level 0 where noise is not to vary."""
    start = torch.zeros(seen.shape.shape[1], dtype=torch.float64)
    start[0] = 0.5 * seen.squared.mean().clamp_min(_LEAST**2).log()
    parameters = start.clone().requires_grad_()
    free = torch.ones_like(start) if varying else torch.zeros_like(start)
    free[0] = 1
    optimizer = torch.optim.LBFGS([parameters], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        own = start * (1 - free) + parameters * free
        value = 0.5 * STIFFNESS * own[1:].square().sum() - _log_prob(seen, own).sum()
        value.backward()
        return value

    optimizer.step(loss)
    return (start * (1 - free) + parameters.detach() * free).detach()
