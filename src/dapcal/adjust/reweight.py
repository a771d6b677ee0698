"""Reweight: importance weights on the base draws, the paper's estimator.

    log w(θ) = ½ Σ_g c_g ‖θ_g‖² − log Z(c),   Z(c) = E[exp(½ Σ_g c_g ‖θ_g‖²)] over the posterior.

With many parameters and few draws the weights collapse: the total weight W = mean_s w_s falls far under 1, and the
"probabilities" sum to W. That is what the paper's tables rest on; it is kept faithful and reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from dapcal.diagnostics import pareto_smooth
from dapcal.ensembles import base_ensemble, outputs_with_spread
from dapcal.interpolation import Tabulated
from dapcal.posteriors.gaussian import prior_of
from dapcal.posteriors.network import NetworkPosterior
from dapcal.prior import Prior
from dapcal.storing import Stores
from dapcal.types import Adjusted, Adjustment, Ensemble, Posterior


class Normaliser(Protocol):
    """How Z is found."""

    def __call__(self, posterior: Posterior) -> Callable[[Tensor], Tensor]:
        """A function from distances d (N,) to log Z (N,)."""
        ...


@dataclass(frozen=True)
class ClosedForm:
    """log Z in closed form, for Gaussian posteriors (the paper's appendix)."""

    stores = Stores()

    def __call__(self, posterior: Posterior) -> Callable[[Tensor], Tensor]:
        """Tabulated in log((σ0 + d)/σ0), on which log Z is smooth: each parameter is touched a few dozen times."""
        gaussian, prior = posterior.gaussian, posterior.prior
        if gaussian is None or prior is None:
            raise ValueError(
                "The closed-form normaliser needs a Gaussian posterior with a prior scale, and this one has "
                f"{'no moments' if gaussian is None else 'no prior'}; use Reweight(normaliser=SelfNormalised()) or "
                "Inflate(), which needs neither"
            )
        lead = prior.lead

        def at_log_widening(t: Tensor) -> Tensor:
            return gaussian.log_expectation(prior.precision_drop(torch.expm1(t) / lead), prior)

        table = Tabulated(at_log_widening)
        return lambda distance: table(torch.log1p(distance.to(prior.sigma0) * lead))


@dataclass(frozen=True)
class SelfNormalised:
    """Z by the posterior mean over the same draws (the paper's identity): weights sum to one, always."""

    stores = Stores()

    def __call__(self, posterior: Posterior) -> Callable[[Tensor], Tensor]:
        """log mean_s exp(½ Σ c ‖θ_s‖²)."""

        def at(distance: Tensor) -> Tensor:
            values = log_ratio(posterior, distance)
            return torch.logsumexp(values, 0) - math.log(len(values))

        return at


@dataclass(frozen=True, eq=False)
class PriorMonteCarlo:
    """Z from the evidences p(y | x) and p(y | x*, x), by Monte Carlo over draws of the two priors.

    log Z = log p(y | x*, x) − log p(y | x) + Σ_g n_g log((σ0_g + d)/σ0_g). Its variance is enormous for anything but
    small networks and little data. It costs forward passes over the training set for each distance; more than
    `levels` distinct distances are interpolated on a grid over those of the call.

    Args:
        x: training inputs.
        y: training targets.
        draws: from each prior.
        levels: distances evaluated in one call.
        seed: of the draws, the same noise for both priors.
    """

    stores = Stores()

    x: Tensor
    y: Tensor
    draws: int = 1000
    levels: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        if self.levels < 2 or self.draws < 1:
            raise ValueError(f"Expected `levels` >= 2 and `draws` >= 1, got {self.levels} and {self.draws}")

    def __call__(self, posterior: Posterior) -> Callable[[Tensor], Tensor]:
        """Evidence ratio by common random numbers."""
        if not isinstance(posterior, NetworkPosterior) or posterior.prior is None:
            raise ValueError("PriorMonteCarlo needs a posterior over a network's parameters with a prior scale")
        prior: Prior = posterior.prior
        start = prior_of(posterior, self.draws, self.seed)

        def log_evidence(draws: Tensor) -> Tensor:
            outputs = posterior.outputs_at(draws, self.x).double()
            targets = posterior.likelihood.check(outputs, self.y.to(outputs.device))
            joint = posterior.likelihood.log_likelihood(outputs, targets).sum(-1)
            return torch.logsumexp(joint, 0) - math.log(self.draws)

        base = log_evidence(start.draws)

        def at(distance: Tensor) -> Tensor:
            unique, inverse = distance.double().unique(return_inverse=True)
            grid = (
                unique
                if len(unique) <= self.levels
                else torch.linspace(float(unique[0]), float(unique[-1]), self.levels, dtype=torch.float64)
            )
            values = []
            for d in grid:
                log_wide = prior.log_widening(d[None])[0]
                widened = start.draws * log_wide.exp()[prior.group].to(start.draws)
                values.append(log_evidence(widened) - base + (prior.sizes * log_wide).sum() if d > 0 else base * 0)
            table = torch.stack(values)
            if len(unique) <= self.levels:
                return table[inverse]
            return _linear(distance.double(), grid, table)

        return at


@dataclass(frozen=True)
class Reweight(Adjustment):
    """Importance weights on the base draws.

    Args:
        normaliser: how Z is found; `ClosedForm` is the paper.
        normalise: divide the weights by their sum. Proper, but of no use with many parameters: one draw wins.
        complete: give the mass that the weights miss to the most uncertain answer,
            min(W, 1)·p̂ + (1 − min(W, 1))/K with p̂ self-normalised (classification).
        smooth: Pareto-smooth the largest weights.
    """

    stores = Stores()

    normaliser: Normaliser = field(default_factory=ClosedForm)
    normalise: bool = False
    complete: bool = False
    smooth: bool = False

    def __post_init__(self) -> None:
        if self.normalise and self.complete:
            raise ValueError("Expected `normalise` or `complete`, not both: normalised weights miss no mass")

    def __call__(self, posterior: Posterior, x: Tensor) -> Adjusted:
        """One pass over the draws; every distance is free after that."""
        log_ratio(posterior, torch.zeros(1))  # refuses a posterior without draws or prior before any forward pass
        log_z = self.normaliser(posterior)
        outputs = outputs_with_spread(posterior, x)
        base = base_ensemble(posterior.likelihood, outputs)
        if self.complete and posterior.likelihood.most_uncertain(base) is None:
            raise ValueError(
                "`complete` needs a most uncertain answer, which only classification has; use Inflate() for regression"
            )
        if self.complete:
            nothing = outputs.new_zeros((1, *outputs.shape[1:]))  # zero logits: the uniform answer as one more draw
            completed = base_ensemble(posterior.likelihood, torch.cat([outputs, nothing]))

        def at(distance: Tensor) -> Ensemble:
            log_weights = base.log_weights + (log_ratio(posterior, distance) - log_z(distance))
            if self.smooth:
                log_weights = pareto_smooth(log_weights)[0]
            importance, total = log_weights, torch.logsumexp(log_weights, 0)
            if self.normalise:  # log Z cancels: far away it is so large that it would cost the weights their digits
                log_weights = base.log_weights + log_ratio(posterior, distance)
                log_weights = (pareto_smooth(log_weights)[0] if self.smooth else log_weights).log_softmax(0)
            if not self.complete:
                return base._replace(log_weights=log_weights, importance=importance)
            missing = -torch.expm1(total.clamp_max(0))
            proper = torch.where(total > 0, log_weights.log_softmax(0), log_weights)
            scaled = torch.cat([proper, missing.clamp_min(0).log()[None]])
            return completed._replace(log_weights=scaled, importance=importance)

        return at


def log_ratio(posterior: Posterior, distance: Tensor) -> Tensor:
    """½ Σ_g c_g ‖θ_g‖², the unnormalised log weight of every draw, (S, N)."""
    norms, prior = posterior.squared_norms, posterior.prior
    if norms is None or prior is None:
        raise ValueError(
            "Reweight needs parameter draws and the prior scale sigma0; set it with "
            "posterior.with_prior(prior_scale), or use Inflate(), which needs neither"
        )
    return 0.5 * norms @ prior.precision_drop(distance).T


def _linear(x: Tensor, grid: Tensor, values: Tensor) -> Tensor:
    """Linear interpolation on an ascending grid."""
    right = torch.searchsorted(grid, x).clamp(1, len(grid) - 1)
    share = (x - grid[right - 1]) / (grid[right] - grid[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])
