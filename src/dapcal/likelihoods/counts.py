"""The likelihood of counts: Poisson, with a rate that is uncertain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dapcal.likelihoods.base import Interval, Likelihood, Unconditional, expectation, numbers_in_columns
from dapcal.records import Conditional, Ensemble
from dapcal.storing import Stores


@dataclass(frozen=True)
class Poisson(Likelihood):
    """Counts 0, 1, 2, …; outputs are the logarithms of their K rates (N, K).

    An analytic spread is the variance V of a log rate, and to first order the relative variance of the rate. The rate
    then follows a Gamma distribution with the mean that it had, as distance widens and never moves a prediction: for
    draws of rates r_s with weights w_s the mean is Σ w_s r_s, and the variance
    Σ w_s r_s + Σ w_s r_s² (1 + V) − (Σ w_s r_s)². The density is the negative binomial that has them, which of a single
    draw is exact; `log_prob_mixture` is the exact mixture over draws. A log-normal rate of variance r² (e^V − 1) says
    the same where V is small, and explodes with the V of a last layer far from its data.
    """

    stores = Stores()

    def conditional(self, outputs: Tensor) -> Conditional:
        """Rate, which is mean and variance; the entropy has no closed form, and `entropy` refuses it."""
        rate = outputs.double().exp()
        return Conditional(rate, rate, torch.full_like(rate[..., 0], torch.nan))

    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """y log rate − rate − log y!, summed over targets."""
        return (y * outputs - outputs.exp() - torch.lgamma(y + 1)).sum(-1)

    def variance(self, ensemble: Ensemble) -> Tensor:
        """Expected Poisson noise plus the variance of the rate, (N, K)."""
        rate = ensemble.conditional.mean
        second = expectation(ensemble, rate**2)
        location = second - expectation(ensemble, rate) ** 2
        # unnormalised weights above 1 can make the difference of moments negative
        return self.aleatoric(ensemble) + location.clamp_min(0) + second * ensemble.spread

    def room(self, base: Ensemble, limit: Unconditional) -> Tensor:
        """The room of the variance in units of the rate's second moment."""
        second = expectation(base, base.conditional.mean**2)
        return super().room(base, limit) / second.clamp_min(torch.finfo(second.dtype).tiny)

    def unconditional(self, y: Tensor) -> Unconditional:
        """Mean and variance of the counts."""
        return Unconditional(tuple(y.double().mean(0).tolist()), tuple(y.double().var(0, correction=0).tolist()))

    def doubt(self, base: Ensemble) -> Tensor:
        """log of the rate's relative variance, averaged: a large rate is not a doubtful one."""
        relative = self.split(base, base).epistemic / self.mean(base).clamp_min(torch.finfo(torch.float64).tiny) ** 2
        return relative.clamp_min(torch.finfo(relative.dtype).tiny).log().mean(-1)

    def log_prob(self, ensemble: Ensemble, y: Tensor) -> Tensor:
        """Of the negative binomial that has the predictive mean and variance, (N,)."""
        return log_negative_binomial(y, self.mean(ensemble), self.variance(ensemble)).sum(-1)

    def log_prob_mixture(self, ensemble: Ensemble, y: Tensor) -> Tensor:
        """log Σ_s w_s p(y | rate_s), every rate widened by the spread, (N,)."""
        rate = ensemble.conditional.mean
        density = log_negative_binomial(y, rate, rate + rate**2 * ensemble.spread).sum(-1)
        return torch.logsumexp(ensemble.log_weights + density, 0)

    def curvature_root(self, outputs: Tensor) -> Tensor:
        """√rate on the diagonal."""
        return torch.diag_embed((outputs / 2).exp())

    def columns(self, ensemble: Ensemble, base: Ensemble, level: float) -> dict[str, Tensor]:
        """Mean, interval, and the parts of the standard deviation, (N, K) each."""
        return numbers_in_columns(self, ensemble, base, level)

    def sample(self, ensemble: Ensemble, n: int, generator: torch.Generator) -> Tensor:
        """Counts of the negative binomial of the moments, (n, N, K): its quantiles at uniform numbers."""
        mean, variance = self.mean(ensemble), self.variance(ensemble)
        uniform = torch.rand(n, *mean.shape, generator=generator, dtype=mean.dtype).to(mean.device)
        return quantile(uniform, mean, variance)

    def interval(self, ensemble: Ensemble, level: float) -> Interval:
        """Between quantiles of the negative binomial of the moments."""
        return self.interval_of(self.mean(ensemble), self.variance(ensemble), level)

    def interval_of(self, mean: Tensor, variance: Tensor, level: float) -> Interval:
        """Counts at the quantiles (1 ∓ level)/2, ends included, so that they hold `level` or more."""
        ends = (torch.full_like(mean, (1 + sign * level) / 2) for sign in (-1, 1))
        return Interval(*(quantile(end, mean, variance) for end in ends))

    def place_of(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """Half-way up the step that the distribution function makes at the count."""
        return (distribution(y - 1, mean, variance) + distribution(y, mean, variance)) / 2

    def check(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Counts (N, K), or (N,) for one, in the outputs' precision."""
        n, targets = outputs.shape[-2:]
        y = y[:, None] if y.ndim == 1 else y
        if y.shape != (n, targets):
            raise ValueError(
                f"Expected counts of shape ({n}, {targets}), one for every output (the log of a rate), got "
                f"{tuple(y.shape)}"
            )
        if y.is_floating_point() and not y.isfinite().all():
            raise ValueError("Expected finite counts, got NaN or inf; drop those rows")
        if bool((y < 0).any()) or bool((y != y.round()).any() if y.is_floating_point() else False):
            raise ValueError("Expected counts 0, 1, 2, …, got negative numbers or fractions; for those use Gaussian")
        return y.to(outputs.dtype)


def log_negative_binomial(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """log of the negative binomial with this mean and variance, elementwise; where variance <= mean a Poisson's.

    With size n = mean²/(variance − mean): Γ(y + n)/(Γ(n) y!) (n/(n + mean))ⁿ (mean/(n + mean))^y.
    """
    mean = mean.clamp_min(torch.finfo(mean.dtype).tiny)
    excess = (variance - mean) / mean**2  # 1/n
    wide = excess > _NARROW
    n = 1 / torch.where(wide, excess, 1.0)
    poisson = torch.special.xlogy(y, mean) - mean - torch.lgamma(y + 1)
    wider = (
        torch.lgamma(y + n) - torch.lgamma(n) - torch.lgamma(y + 1)
        - n * torch.log1p(mean / n) + torch.special.xlogy(y, mean / (n + mean))
    )  # fmt: skip
    # of a narrow rate the first term in 1/n, as log Γ(y + n) − log Γ(n) would cost all digits
    narrow = poisson + excess.clamp(0, _NARROW) * ((y - mean) ** 2 - y) / 2
    return torch.where(wide, wider, narrow)


def quantile(level: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """The smallest count that the negative binomial with this mean and variance does not exceed with `level`."""
    return _by_scipy("ppf", level, mean, variance).clamp_min(0)


def distribution(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """P(count <= y) under the negative binomial with this mean and variance."""
    return _by_scipy("cdf", y, mean, variance)


def _by_scipy(function: str, at: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    from scipy import stats  # takes a second to import

    place, mu, total = (value.detach().double().cpu().numpy() for value in (at, mean, variance))
    excess = (total - mu) / mu.clip(1e-300) ** 2
    size = 1 / excess.clip(_NARROW)
    wide, narrow = getattr(stats.nbinom, function), getattr(stats.poisson, function)
    found = np.where(excess > _NARROW, wide(place, size, size / (size + mu)), narrow(place, mu))
    return torch.from_numpy(found).to(mean)


_NARROW = 1e-8  # relative variance of a rate under which a negative binomial is a Poisson but for its first term
