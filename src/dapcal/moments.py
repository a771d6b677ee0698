"""Moments of outputs that are linear in Gaussian parameters, as functions of the distance.

With outputs f + J (θ − μ), θ ~ N(μ, Σ), the variance of a location output is J Σ Jᵀ. Along a direction of Σ with
variance λ = ρ σ0² it grows under Transport, at distance d with q = (σ0/(σ0 + d))², from λ to

    λ/(1 − cλ) = λ + λ (1 − q)/(e^(−s) + q),   s = log(ρ/(1 − ρ)),

a smooth function of s whatever the distance. So each input keeps its variance as a sum over Chebyshev nodes in s, a few
hundred numbers however many parameters there are, and every distance is cheap after that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.gaussians import Decomposed, Directions
from dapcal.interpolation import basis, chebyshev
from dapcal.likelihoods import Likelihood
from dapcal.prior import Prior

WIDTH, NODES, LIMIT = 2.0, 14, 36.0  # pieces of s; its nearest singularity is π off the real line: error about 1e-11


class Profile(NamedTuple):
    """Variance of the outputs along the directions of one group of the prior, gathered at nodes in s."""

    group: int
    weights: Tensor  # (N, K, M)
    nodes: Tensor  # (M,)


@dataclass(frozen=True, eq=False)
class OutputMoments:
    """Moments of the outputs at N inputs.

    Attributes:
        mean: outputs at the mean of the parameters, (N, C).
        variance: pooled variance of the locations (`Likelihood.pooled`), (N, K) in float64.
        profiles: how it grows with the distance, for each distance-aware group; empty where that was not asked for.
        prior: σ0 and distance factors, where there are profiles.
    """

    mean: Tensor
    variance: Tensor
    profiles: tuple[Profile, ...] = ()
    prior: Prior | None = None

    def moved(self, distance: Tensor) -> Tensor:
        """The pooled variance at distances (N,), the mean being kept, (N, K)."""
        if self.prior is None:
            raise ValueError("These moments were not prepared for a distance; ask for them with moving=True")
        log_widening = self.prior.log_widening(distance).to(self.variance.device)  # (N, G)
        variance = self.variance
        for profile in self.profiles:
            t = log_widening[:, profile.group, None]  # (N, 1)
            growth = -torch.expm1(-2 * t) / (torch.exp(-profile.nodes) + torch.exp(-2 * t))  # (N, M)
            variance = variance + torch.einsum("nkm,nm->nk", profile.weights, growth)
        return variance


def joined(parts: Iterable[OutputMoments]) -> OutputMoments:
    """The moments of several batches of inputs, one after the other."""
    parts = list(parts)
    profiles = tuple(
        Profile(p.group, torch.cat([m.profiles[i].weights for m in parts]), p.nodes)
        for i, p in enumerate(parts[0].profiles)
    )
    mean, variance = torch.cat([m.mean for m in parts]), torch.cat([m.variance for m in parts])
    return OutputMoments(mean, variance, profiles, parts[0].prior)


def aware_groups(prior: Prior) -> list[int]:
    """Groups of the prior that the distance widens."""
    return torch.nonzero(prior.factor > 0).flatten().tolist()


@dataclass(frozen=True, eq=False)
class FromJacobian:
    """Moments from a dense Jacobian; what depends on the Gaussian alone is prepared once."""

    likelihood: Likelihood
    gaussian: Decomposed
    prior: Prior | None
    bases: dict[int, tuple[Directions, Pieces]]

    def __call__(self, mean: Tensor, jacobian: Tensor) -> OutputMoments:
        """For outputs (n, C) with a Jacobian of the locations (n, L, P) in float64."""
        variance = self.likelihood.pooled(self.gaussian.variance_of(jacobian))
        profiles = []
        for group, (directions, pieces) in self.bases.items():
            energy = directions.energy(jacobian)  # (n, L, R)
            pooled = self.likelihood.pooled(energy.transpose(1, 2)).transpose(1, 2)
            profiles.append(Profile(group, pieces.gather(pooled), pieces.nodes))
        return OutputMoments(mean, variance, tuple(profiles), self.prior)


def from_jacobian(likelihood: Likelihood, gaussian: object, prior: Prior | None, moving: bool) -> FromJacobian:
    """Prepare moments for one Gaussian; `moving` also for other distances."""
    if not isinstance(gaussian, Decomposed):
        raise TypeError(f"Linear outputs have no closed form with {type(gaussian).__name__}; predict by sampling")
    if not moving:
        return FromJacobian(likelihood, gaussian, None, {})
    prior = need_prior(prior)
    bases = {}
    for group in aware_groups(prior):
        directions = gaussian.directions(prior, group)
        bases[group] = directions, make_pieces(directions.variance, float(prior.sigma0[group]))
    return FromJacobian(likelihood, gaussian, prior, bases)


def need_prior(prior: Prior | None) -> Prior:
    """The prior, which Transport cannot do without."""
    if prior is None:
        raise ValueError("Transport needs a prior scale; set it with posterior.with_prior(prior_scale)")
    return prior


@dataclass(frozen=True, eq=False)
class Pieces:
    """Directions sorted into pieces of s, with the values of the node polynomials there."""

    nodes: Tensor  # (M,)
    members: tuple[Tensor, ...]  # directions in each piece
    values: tuple[Tensor, ...]  # (directions, NODES) in each piece

    def gather(self, energy: Tensor) -> Tensor:
        """Energies (..., R) along all directions as weights (..., M) at the nodes."""
        return torch.cat([energy[..., m] @ v for m, v in zip(self.members, self.values, strict=True)], -1)

    def rows(self, start: int, stop: int) -> Tensor:
        """The same as a matrix (stop − start, M) for some of the directions."""
        dense = self.nodes.new_zeros(stop - start, len(self.nodes))
        for piece, (member, value) in enumerate(zip(self.members, self.values, strict=True)):
            here = (member >= start) & (member < stop)
            dense[member[here] - start, piece * NODES : (piece + 1) * NODES] = value[here]
        return dense


def make_pieces(variance: Tensor, sigma0: float) -> Pieces:
    """Sort directions of the given variances (R,) by s; those wider than the prior count as the prior."""
    ratio = (variance.double() / sigma0**2).clamp(0, 1)
    s = (ratio.log() - torch.log1p(-ratio)).clamp(-LIMIT, LIMIT)
    start, unit = (s / WIDTH).floor(), chebyshev(NODES, s)
    nodes, members, values = [], [], []
    for piece in start.unique():
        member = torch.nonzero(start == piece).flatten()
        nodes.append((piece + unit) * WIDTH)
        members.append(member)
        values.append(basis(s[member] / WIDTH - piece, unit))
    return Pieces(torch.cat(nodes), tuple(members), tuple(values))
