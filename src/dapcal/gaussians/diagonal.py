"""N(μ, diag σ²): mean-field variational inference, diagonal Laplace."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dapcal.gaussians.base import check_mean, log_expectation_terms, stretch
from dapcal.prior import Prior
from dapcal.storing import Stores


@dataclass(frozen=True, eq=False)
class DiagonalGaussian:
    """N(μ, diag σ²)."""

    stores = Stores()

    mean: Tensor  # (P,)
    variance: Tensor  # (P,)

    def __post_init__(self) -> None:
        check_mean(self.mean)
        if self.mean.shape != self.variance.shape:
            raise ValueError(
                f"Expected `mean` and `variance` of one shape (P,), got {tuple(self.mean.shape)} and "
                f"{tuple(self.variance.shape)}"
            )
        if not (self.variance >= 0).all() or not self.variance.isfinite().all():
            raise ValueError("Expected finite variances >= 0; check the posterior's moments")

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draws (n, P)."""
        noise = torch.randn(n, len(self.mean), generator=generator, dtype=self.mean.dtype)
        return (self.mean + self.variance.sqrt() * noise.to(self.mean.device)).to(self.mean.dtype)

    def narrowed(self, share: float) -> DiagonalGaussian:
        """N(μ, share² Σ)."""
        return replace(self, variance=share**2 * self.variance)

    def contracted(self, prior: Prior) -> int:
        """Number of σ_i above σ0 by more than rounding among the distance-aware parameters."""
        wide = self.variance.double() > prior.sigma0[prior.group] ** 2 * (1 + 1e-6)  # it may be in float32
        return int((wide & (prior.factor[prior.group] > 0)).sum())

    def log_expectation(self, c: Tensor, prior: Prior) -> Tensor:
        """log Z(c), (M,), one row of c at a time: memory stays at P."""
        mean, variance = self.mean.double(), self._inside(prior)
        rows = c if c.shape[1] == 1 else (row[prior.group] for row in c)  # one group: no copy of P numbers
        return torch.stack([log_expectation_terms(mean, variance, row).sum() for row in rows])

    def transport(self, draws: Tensor, c: Tensor, prior: Prior, shift: bool) -> Tensor:
        """σ_d² = σ²/(1 − cσ²); μ_d = μ/(1 − cσ²) with `shift`, else μ."""
        factor = stretch(self._inside(prior), c[prior.group])
        center = self.mean * factor.square() if shift else self.mean.double()
        return (center + (draws - self.mean) * factor).to(draws.dtype)

    def variance_of(self, jacobian: Tensor) -> Tensor:
        """Σ_i J_i² σ_i²."""
        return jacobian.square() @ self.variance.to(jacobian.dtype)

    def directions(self, prior: Prior, group: int) -> Coordinates:
        """The parameters of the group."""
        index = torch.nonzero(prior.group == group).flatten()
        return Coordinates(self.variance.double()[index], index)

    def _inside(self, prior: Prior) -> Tensor:
        return torch.minimum(self.variance.double(), prior.sigma0[prior.group] ** 2)


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Parameters as directions."""

    variance: Tensor  # (R,)
    index: Tensor  # (R,)

    def energy(self, jacobian: Tensor) -> Tensor:
        """J_i² σ_i², (N, L, R)."""
        return jacobian[..., self.index].square() * self.variance
