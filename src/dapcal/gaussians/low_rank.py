"""N(μ, diag(v) + F Fᵀ): a variance for each parameter and K directions that they share, as in SWAG.

With C = diag(c), E = I − C diag(v) and J = Fᵀ C E⁻¹ F, the matrix determinant lemma and Woodbury's identity leave K×K
algebra alone, and P×P matrices are never formed:

    det(I − C^½ Σ C^½) = det E · det(I − J),   Σ_d = (Σ⁻¹ − C)⁻¹ = E⁻¹ diag(v) + E⁻¹ F (I − J)⁻¹ Fᵀ E⁻¹.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from dapcal.gaussians.base import check_mean
from dapcal.prior import Prior
from dapcal.storing import Stores

MARGIN = 2.0**-26  # c Σ stays this far under I: rounding in E = I − C diag(v) comes back divided by E
FLOOR = 1e-12  # least share of v in a parameter's own variance, where a draw is divided by √v


@dataclass(frozen=True, eq=False)
class LowRankGaussian:
    """N(μ, diag(v) + F Fᵀ), the covariance of SWAG (Maddox et al., 2019, arXiv:1902.02476).

    Where Σ is wider than the prior in some direction, αΣ takes its place in log Z and in the map that moves draws and
    mean, with the largest α <= 1 that brings it inside the prior: c = 0 stays the exact identity.
    """

    stores = Stores()

    mean: Tensor  # (P,)
    variance: Tensor  # (P,)
    factor: Tensor  # (P, K)
    _shares: dict[Prior, float] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_mean(self.mean)
        p = len(self.mean)
        if self.variance.shape != (p,):
            raise ValueError(f"Expected `variance` of shape ({p},) like `mean`, got {tuple(self.variance.shape)}")
        if self.factor.ndim != 2 or len(self.factor) != p:
            raise ValueError(f"Expected `factor` of shape ({p}, K), got {tuple(self.factor.shape)}; transpose it?")
        if self.factor.shape[1] == 0:
            raise ValueError("Expected `factor` with at least one column, got none; use DiagonalGaussian")
        if not (self.variance >= 0).all() or not self.variance.isfinite().all():
            raise ValueError("Expected finite variances >= 0; check the posterior's moments")
        if not self.factor.isfinite().all():
            raise ValueError("Expected a finite `factor`, got NaN or inf; check the posterior's moments")

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draws (n, P): μ + √v ε + F ε'."""
        p, k = self.factor.shape
        noise = torch.randn(n, p + k, generator=generator, dtype=self.mean.dtype).to(self.mean.device)
        own, shared = noise.split((p, k), 1)
        draws = self.mean + self.variance.sqrt() * own + shared @ self.factor.to(self.mean.dtype).T
        return draws.to(self.mean.dtype)

    def narrowed(self, share: float) -> LowRankGaussian:
        """N(μ, share² Σ)."""
        return LowRankGaussian(self.mean, share**2 * self.variance, share * self.factor)

    def contracted(self, prior: Prior) -> int:
        """Number of eigenvalues of S⁻¹ Σ_AA S⁻¹ above 1, with A the distance-aware parameters and S = diag(σ0)."""
        return _eigenvalues_above(1 + MARGIN, *self._in_units_of(prior))

    def log_expectation(self, c: Tensor, prior: Prior) -> Tensor:
        """log Z(c), (M,): −½ log det(I − C^½ Σ C^½) + ½ μᵀ C^½ (I − C^½ Σ C^½)⁻¹ C^½ μ, one row of c at a time."""
        mean, variance, factor = self.mean.double(), self.variance.double(), self.factor.double()
        share = self._share(prior)
        values = []
        for row in c:
            drop = share * _of_each_parameter(row, prior)  # αΣ against C is Σ against αC
            own, shared, basis = _inside(drop, variance, factor)
            lean = drop * mean / (1 - own)
            quadratic = (lean * mean).sum() + ((lean @ factor @ basis).square() / (1 - shared)).sum()
            log_det = torch.log1p(-own).sum() + torch.log1p(-shared).sum()
            values.append(0.5 * quadratic / share - 0.5 * log_det)
        return torch.stack(values)

    def transport(self, draws: Tensor, c: Tensor, prior: Prior, shift: bool) -> Tensor:
        """δ_d = R_d R⁻¹ δ with roots R Rᵀ = Σ, R = V^½ (I + G Gᵀ)^½, G = V^−½ F, and R_d alike; μ_d = μ + Σ_d C μ."""
        drop = self._share(prior) * _of_each_parameter(c, prior)
        if not drop.any():
            return draws.clone()
        mean, variance, factor = self.mean.double(), self.variance.double(), self.factor.double()
        own, shared, basis = _inside(drop, variance, factor)
        scale, vectors, lengths = self._root
        scale_d = scale * (1 - own).rsqrt()
        # Σ_d = diag(scale_d²) + columns columnsᵀ
        columns = (factor / (1 - own)[:, None]) @ basis * (1 - shared).rsqrt()
        vectors_d, lengths_d = _low_rank_root(columns / scale_d[:, None])
        noise = (draws.double() - mean) / scale
        noise = noise + (noise @ vectors * (1 / lengths - 1)) @ vectors.T
        noise = noise + (noise @ vectors_d * (lengths_d - 1)) @ vectors_d.T
        moved = mean + noise * scale_d
        if shift:
            lean = drop * mean / (1 - own)
            moved = moved + variance * lean + columns @ (lean @ factor @ basis * (1 - shared).rsqrt())
        return torch.where(self._spread > 0, moved.to(draws.dtype), draws)

    @cached_property
    def _spread(self) -> Tensor:
        """The diagonal of Σ."""
        return self.variance.double() + self.factor.double().square().sum(1)

    @cached_property
    def _root(self) -> tuple[Tensor, Tensor, Tensor]:
        """Σ^½ as √v and the low-rank part of (I + G Gᵀ)^½.

        Draws are divided by √v, so v is at least a tiny share of the parameter's variance, and the rounding of draws:
        else the last digit of a large parameter that hardly varies would be read as noise in the shared directions.
        """
        rounding = (self.mean.double() * torch.finfo(self.mean.dtype).eps).square()
        variance = torch.maximum(self.variance.double(), torch.maximum(FLOOR * self._spread, rounding))
        scale = torch.where(self._spread > 0, variance, 1.0).sqrt()
        return scale, *_low_rank_root(self.factor.double() / scale[:, None])

    def _share(self, prior: Prior) -> float:
        """α, the largest share of Σ inside the prior."""
        if prior not in self._shares:
            variance, factor = self._in_units_of(prior)
            wide = _eigenvalues_above(1 - MARGIN, variance, factor) > 0
            self._shares[prior] = (1 - MARGIN) / _top_eigenvalue(variance, factor) if wide else 1.0
        return self._shares[prior]

    def _in_units_of(self, prior: Prior) -> tuple[Tensor, Tensor]:
        """v and F of the distance-aware parameters, divided by σ0² and σ0."""
        aware = prior.factor[prior.group] > 0
        sigma0 = prior.sigma0[prior.group[aware]]
        return self.variance[aware].double() / sigma0**2, self.factor[aware].double() / sigma0[:, None]


def _of_each_parameter(c: Tensor, prior: Prior) -> Tensor:
    """The diagonal of C, (P,), from c (G,)."""
    return torch.where(prior.factor > 0, c, 0.0)[prior.group]


def _inside(drop: Tensor, variance: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """c v (P,), and eigenvalues (K,) and eigenvectors (K, K) of J = Fᵀ diag(c/(1 − c v)) F; both are under 1."""
    own = drop * variance
    weighted = factor * (drop / (1 - own)).sqrt()[:, None]
    shared, basis = torch.linalg.eigh(weighted.T @ weighted)
    return own, shared, basis


def _low_rank_root(columns: Tensor) -> tuple[Tensor, Tensor]:
    """(I + G Gᵀ)^½ = I + U diag(n − 1) Uᵀ: U and n. Not from Gᵀ G, whose square would cost half of the digits."""
    q, r = torch.linalg.qr(columns)
    u, s, _ = torch.linalg.svd(r, full_matrices=False)
    return q @ u, torch.hypot(s, torch.ones_like(s))


def _eigenvalues_above(level: float, variance: Tensor, factor: Tensor) -> int:
    """How many eigenvalues of A = diag(v) + F Fᵀ exceed a level l > 0.

    Sylvester's law of inertia on the two Schur complements of [[l − v, F], [Fᵀ, I]]: l − A has as many negative
    eigenvalues as l − v and I − Fᵀ (l − v)⁻¹ F together.
    """
    gap = level - variance
    gap = torch.where(gap.abs() < 2.0**-52 * level, 2.0**-52 * level, gap)
    inner = torch.eye(factor.shape[1]).to(factor) - factor.T @ (factor / gap[:, None])
    return int((gap < 0).sum() + (torch.linalg.eigvalsh(inner) < 0).sum())


def _top_eigenvalue(variance: Tensor, factor: Tensor) -> float:
    """The largest eigenvalue of diag(v) + F Fᵀ, or up to 1e-9 of it more, by bisection."""
    widest, strongest = float(variance.max()), float(torch.linalg.eigvalsh(factor.T @ factor)[-1])
    lower, upper = max(widest, strongest), widest + strongest
    while upper - lower > 1e-9 * upper:
        middle = (lower + upper) / 2
        if _eigenvalues_above(middle, variance, factor) > 0:
            lower = middle
        else:
            upper = middle
    return upper
