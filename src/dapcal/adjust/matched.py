"""MomentMatched: importance weights on draws that were moved towards their target first.

For a drop c the target is q(θ) exp(½ Σ_g c_g ‖θ_g‖²)/Z(c), with q = N(μ, diag σ²). An affine map T of the draws makes
them draws of q_T = q∘T⁻¹/|det T|, and their weights are

    log w(θ') = log q(θ') − log q_T(θ') + ½ Σ_g c_g ‖θ'_g‖² − log Z(c),   θ' = T(θ):

Reweight where T is the identity. T is found from the weighted moments of the draws themselves (Paananen, Piironen,
Bürkner and Vehtari 2021, arXiv:1906.08850). That takes many draws for each parameter: with fewer the moments are noise,
no map helps, and the weights stay as collapsed as Reweight's. The answer aimed at is `Transport(shift=True)`, which is
exact and needs no weights; this shows what better proposals do for the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from dapcal.adjust.reweight import ClosedForm
from dapcal.diagnostics import MIN_DRAWS, pareto_smooth
from dapcal.ensembles import base_ensemble, outputs_with_spread
from dapcal.gaussians import DiagonalGaussian
from dapcal.posteriors.network import NetworkPosterior
from dapcal.prior import Prior
from dapcal.storing import Stores
from dapcal.types import Adjusted, Adjustment, Ensemble, Posterior

_LEVELS = 64  # kept between calls, two numbers for each parameter
_TOLERANCE = math.log(2)  # on the total weight, which estimates 1


@dataclass(frozen=True)
class MomentMatched(Adjustment):
    """Importance weights by moment matching, for a diagonal Gaussian posterior.

    A map is matched for every level of distance on a grid in log((σ0 + d)/σ0). An input takes the draws of the nearest
    level, weighted for its own distance: the grid chooses the proposal, never the target. Between two levels
    predictions jump by their sampling error. A new φ costs about one pass over the draws; memory is two numbers in
    float64 for each number of the draws.

    Args:
        normalise: divide the weights by their sum.
        step: of the grid; None matches every distinct distance.
        threshold: of Pareto k̂, under which the draws are good enough and stay where they are (the reference's 0.7);
            None goes on while k̂ falls.
        rounds: accepted maps at most.
    """

    stores = Stores()

    normalise: bool = False
    step: float | None = 0.1
    threshold: float | None = None
    rounds: int = 30

    def __post_init__(self) -> None:
        if self.step is not None and not self.step > 0:
            raise ValueError(f"Expected `step` > 0 or None, got {self.step}")
        if self.rounds < 1:
            raise ValueError(f"Expected `rounds` >= 1, got {self.rounds}; Reweight() leaves the draws where they are")

    def __call__(self, posterior: Posterior, x: Tensor) -> Adjusted:
        """One pass over the base draws; levels of distance cost further ones."""
        if (
            not isinstance(posterior, NetworkPosterior)
            or not isinstance(posterior.gaussian, DiagonalGaussian)
            or posterior.prior is None
        ):
            raise ValueError(
                "MomentMatched needs a diagonal Gaussian posterior over a network's parameters with a prior scale; use "
                "Transport(shift=True), which is exact for every Gaussian, or Inflate(), which works on any posterior"
            )
        outputs = outputs_with_spread(posterior, x)
        if len(outputs) < MIN_DRAWS:
            raise ValueError(
                f"Expected at least {MIN_DRAWS} draws, got {len(outputs)}: MomentMatched judges its maps by Pareto k̂; "
                "take more draws, or use Transport(shift=True), which needs none of it"
            )
        likelihood, prior, lead = posterior.likelihood, posterior.prior, posterior.prior.lead
        base = base_ensemble(likelihood, outputs)
        log_z = ClosedForm()(posterior)
        noise = _standardised(posterior.draws, posterior.gaussian, prior)
        prepared = cache(lambda: posterior.prepared(x))

        def log_ratio(proposal: Proposal, distance: Tensor) -> Tensor:
            c = prior.precision_drop(distance)  # (n, G)
            return proposal.log_ratio[:, None] + 0.5 * proposal.squared_norms @ c.T

        @lru_cache(_LEVELS)
        def proposal_at(d: float) -> Proposal:
            if d == 0:
                return noise.unmoved()
            level = torch.tensor([d], dtype=torch.float64)
            log_scale = log_z(level) + math.log(len(outputs))
            return _matched(noise, lambda p: log_ratio(p, level) - log_scale, self.threshold, self.rounds)

        def at(distance: Tensor) -> Ensemble:
            distance = distance.double().cpu()
            levels = distance if self.step is None else (torch.log1p(distance * lead) / self.step).round()
            moved, ratio = outputs.clone(), torch.empty_like(base.log_weights)
            for value in levels.unique():
                rows = torch.nonzero(levels == value).flatten()
                proposal = proposal_at(float(value if self.step is None else torch.expm1(value * self.step) / lead))
                ratio[:, rows] = log_ratio(proposal, distance[rows])
                if proposal.is_moved:
                    moved[:, rows] = prepared()(noise.moved(posterior.draws, proposal), rows)
            importance = base.log_weights + (ratio - log_z(distance))
            # normalised without log Z, which far away is so large that it would cost the weights their digits
            log_weights = (base.log_weights + ratio).log_softmax(0) if self.normalise else importance
            return Ensemble(moved, likelihood.conditional(moved), log_weights, base.spread, importance)

        return at


class Proposal(NamedTuple):
    """Draws moved by z -> location + scale · z, as far as their weights need them."""

    location: Tensor  # (P,)
    scale: Tensor  # (P,)
    squared_norms: Tensor  # (S, G) ‖θ'‖² per group
    log_ratio: Tensor  # (S,) log q(θ') − log q_T(θ')

    @property
    def is_moved(self) -> bool:
        """Whether any map was accepted."""
        return bool(self.location.any() or (self.scale != 1).any())


@dataclass(frozen=True, eq=False)
class Noise:
    """Draws θ = μ + σ z by their noise z, all in float64.

    Where σ = 0 or the distance widens nothing, z is set to 0 and maps leave it there: the target is the posterior in
    these parameters already.
    """

    mean: Tensor  # (P,)
    deviation: Tensor  # (P,)
    z: Tensor  # (S, P)
    squared: Tensor  # (S, P) z²
    member: Tensor  # (P, G) one at the group of each parameter

    def unmoved(self) -> Proposal:
        """The draws as they are."""
        return self.proposal(torch.zeros_like(self.mean), torch.ones_like(self.mean))

    def proposal(self, location: Tensor, scale: Tensor) -> Proposal:
        """By products with z and z², so that no moved draw is held."""
        center, width = self.mean + self.deviation * location, self.deviation * scale
        linear, square = (self.member * factor[:, None] for factor in (2 * center * width, width**2))
        norms = center**2 @ self.member + self.z @ linear + self.squared @ square
        # ½ (z² − (location + scale · z)²) and log|det T|
        log_ratio = 0.5 * (self.squared @ (1 - scale**2) - location @ location) - self.z @ (location * scale)
        return Proposal(location, scale, norms, log_ratio + scale.log().sum())

    def shifted(self, proposal: Proposal, log_weights: Tensor) -> Proposal:
        """The mean of the draws put at their weighted mean."""
        weighted = log_weights.softmax(0) @ self.z
        return self.proposal(proposal.location + proposal.scale * (weighted - self.z.mean(0)), proposal.scale)

    def shifted_and_scaled(self, proposal: Proposal, log_weights: Tensor) -> Proposal:
        """Their variances put at the weighted variances, too."""
        share, mean = log_weights.softmax(0), self.z.mean(0)
        weighted = share @ self.z
        variance, target = self.squared.mean(0) - mean**2, share @ self.squared - weighted**2
        factor = torch.where(variance > 0, (target.clamp_min(0) / variance).sqrt(), 1)
        return self.proposal(proposal.location + proposal.scale * (weighted - factor * mean), proposal.scale * factor)

    def moved(self, draws: Tensor, proposal: Proposal) -> Tensor:
        """θ' for every draw (S, P), in the draws' precision; parameters that no map touches keep every bit."""
        return (draws + self.deviation * (proposal.location + (proposal.scale - 1) * self.z)).to(draws.dtype)


def _standardised(draws: Tensor, gaussian: DiagonalGaussian, prior: Prior) -> Noise:
    mean, deviation = gaussian.mean.double(), gaussian.variance.double().sqrt()
    free = (deviation > 0) & (prior.factor > 0)[prior.group]
    z = torch.where(free, (draws - mean) / torch.where(free, deviation, 1), 0)
    return Noise(mean, deviation, z, z**2, one_hot(prior.group, len(prior.labels)).to(z))


def _matched(noise: Noise, weigh: Callable[[Proposal], Tensor], threshold: float | None, rounds: int) -> Proposal:
    """The maps of the reference, the simpler one first, as long as one of them makes the weights better.

    Better is a lower k̂ and, since Z is known, a total weight within a factor of two of 1, or no further from it than
    before. k̂ alone is fooled where parameters outnumber draws: a shift towards the heaviest draw evens out the weights
    of all, with every draw further from the target.

    Args:
        noise: of the base draws.
        weigh: log weights (S, 1) of a proposal, with Z and 1/S.
        threshold: of k̂, at which to stop.
        rounds: at most.
    """
    proposal = noise.unmoved()
    smooth, k, error = _judged(weigh(proposal))
    for _ in range(rounds):
        if not k > (-math.inf if threshold is None else threshold):  # equal weights have k̂ = NaN
            break
        for move in (noise.shifted, noise.shifted_and_scaled):
            tried = move(proposal, smooth)
            tried_smooth, tried_k, tried_error = _judged(weigh(tried))
            if tried_k < k and tried_error <= max(error, _TOLERANCE):  # never with NaN, of a variance that vanished
                proposal, smooth, k, error = tried, tried_smooth, tried_k, tried_error
                break
        else:
            break
    return proposal


def _judged(log_weights: Tensor) -> tuple[Tensor, float, float]:
    """Smoothed log weights (S,), k̂, and |log W|."""
    smooth, k = pareto_smooth(log_weights)
    return smooth[:, 0], float(k), abs(float(torch.logsumexp(log_weights, 0)))
