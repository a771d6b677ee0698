"""Gaussian posteriors by their moments: log Z(c) and the exact move to a distance-aware prior.

The weight exp(½ Σ_i c_i θ_i²) times a Gaussian N(μ, Σ) is again a Gaussian,

    Σ_d = (Σ⁻¹ − C)⁻¹,   μ_d = Σ_d Σ⁻¹ μ,   C = diag(c),

so both its normaliser Z(c) = E[exp(½ θᵀCθ)] and its moments have closed forms. They exist only while C ≺ Σ⁻¹,
which holds if data contract the prior, Σ ⪯ σ0² I. Optimisation noise leaves some σ_i slightly above σ0: there
the variance is taken as σ0² inside the factors 1 − cσ² alone, so that c = 0 stays the exact identity, and the
number of such directions is reported (`contracted`).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dapcal.prior import Prior


class Gaussian(Protocol):
    """A Gaussian over the flat vector of P random parameters."""

    @property
    def mean(self) -> Tensor:
        """μ, (P,)."""
        ...

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draws (n, P)."""
        ...

    def contracted(self, prior: Prior) -> int:
        """How many distance-aware directions are wider than the prior, and are taken as σ0 in the factors."""
        ...

    def log_expectation(self, c: Tensor, prior: Prior) -> Tensor:
        """log Z(c) for c (M, G), in float64, (M,)."""
        ...

    def narrowed(self, share: float) -> Gaussian:
        """N(μ, share² Σ)."""
        ...

    def transport(self, draws: Tensor, c: Tensor, prior: Prior, shift: bool) -> Tensor:
        """Draws (S, P) of N(μ, Σ) turned into draws of N(μ or μ_d, Σ_d) with the same noise, for one c (G,)."""
        ...


class Directions(Protocol):
    """Directions along which a group of the prior widens a Gaussian."""

    @property
    def variance(self) -> Tensor:
        """λ, (R,)."""
        ...

    def energy(self, jacobian: Tensor) -> Tensor:
        """The share of each direction in the variance of J θ, for J (N, L, P), (N, L, R)."""
        ...


@runtime_checkable
class Decomposed(Protocol):
    """A Gaussian that says how the variance of J θ is made up of directions, so that Transport has a closed form."""

    def variance_of(self, jacobian: Tensor) -> Tensor:
        """diag(J Σ Jᵀ) for J (N, L, P), (N, L)."""
        ...

    def directions(self, prior: Prior, group: int) -> Directions:
        """The directions that a group of the prior widens."""
        ...


def log_expectation_terms(mean: Tensor, variance: Tensor, c: Tensor) -> Tensor:
    """log E[exp(½ c θ²)] for θ ~ N(mean, variance), elementwise; needs c · variance < 1.

    ½ c μ²/(1 − cσ²) − ½ log(1 − cσ²), the paper's marginal ratio.

    >>> log_expectation_terms(torch.tensor(1.0), torch.tensor(0.0), torch.tensor(0.5)).item()
    0.25
    """
    return 0.5 * c * mean**2 / (1 - c * variance) - 0.5 * torch.log1p(-c * variance)


def stretch(variance: Tensor, c: Tensor) -> Tensor:
    """σ_d/σ = 1/√(1 − cσ²), by how much Transport widens a direction."""
    return (1 - c * variance).rsqrt()


def check_mean(mean: Tensor) -> None:
    """A finite vector."""
    if mean.ndim != 1:
        raise ValueError(f"Expected `mean` of shape (P,), got {tuple(mean.shape)}")
    if not mean.isfinite().all():
        raise ValueError("Expected a finite `mean`, got NaN or inf; check the posterior's moments")
