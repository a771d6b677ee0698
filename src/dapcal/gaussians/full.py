"""N(μ, Σ) with a full covariance: last layers and small networks."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor

from dapcal.gaussians.base import check_mean, log_expectation_terms
from dapcal.prior import Prior
from dapcal.storing import Stores


@dataclass(frozen=True, eq=False)
class FullGaussian:
    """N(μ, Σ) with a full covariance.

    One group of parameters carries the distance (set A): everything follows from one eigendecomposition
    Σ_AA = U diag(λ) Uᵀ, made on first use. The weight touches θ_A alone, so p(θ_rest | θ_A) stays: a draw's A-part
    is stretched along U, and the rest follows by Σ_{rest,A} Σ_AA⁻¹. With several groups the decomposition of
    C^½ Σ_AA C^½ is made for each c.
    """

    stores = Stores()

    mean: Tensor  # (P,)
    covariance: Tensor  # (P, P)
    checked: InitVar[bool] = False  # whether the covariance is known to be positive semi-definite
    _eigenpairs: dict[bytes, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)
    _forms: dict[tuple[bytes, bytes], Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self, checked: bool) -> None:
        check_mean(self.mean)
        p = len(self.mean)
        if self.covariance.shape != (p, p):
            raise ValueError(f"Expected `covariance` of shape ({p}, {p}), got {tuple(self.covariance.shape)}")
        if not self.covariance.isfinite().all() or not torch.allclose(
            self.covariance, self.covariance.T, atol=1e-5 * float(self.covariance.abs().max())
        ):
            raise ValueError("Expected a finite, symmetric `covariance`; symmetrise it with (C + C.T) / 2")
        if not checked and self._eigen(torch.arange(p))[0].min() < -1e-6 * self.covariance.diagonal().max():
            raise ValueError("Expected a positive semi-definite `covariance`; add a small multiple of I to it")

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draws (n, P)."""
        eigenvalues, vectors = self._eigen(torch.arange(len(self.mean)))
        noise = torch.randn(n, len(self.mean), generator=generator, dtype=torch.float64)
        noise = noise.to(self.mean.device) * eigenvalues.clamp_min(0).sqrt()
        return (self.mean + noise @ vectors.T).to(self.mean.dtype)

    def narrowed(self, share: float) -> FullGaussian:
        """N(μ, share² Σ)."""
        return FullGaussian(self.mean, share**2 * self.covariance, checked=True)

    def contracted(self, prior: Prior) -> int:
        """Number of eigenvalues of Σ_AA above σ0² by more than rounding (one group); several are never contracted."""
        _, groups, eigenvalues, _ = self._aware(prior)
        limit = prior.sigma0[groups[0]] ** 2 * (1 + 1e-6)  # the covariance may be in float32
        return 0 if len(groups) > 1 else int((eigenvalues > limit).sum())

    def log_expectation(self, c: Tensor, prior: Prior) -> Tensor:
        """log Z(c), (M,), in the eigenbasis."""
        index, groups, eigenvalues, vectors = self._aware(prior)
        mean = self.mean.double()[index]
        if len(groups) == 1:
            rotated, inside = vectors.T @ mean, eigenvalues.clamp_max(float(prior.sigma0[groups[0]]) ** 2)
            return torch.stack([log_expectation_terms(rotated, inside, v).sum() for v in c[:, groups[0]]])
        values = []
        for row in c:
            root, m, q = self._scaled_eigen(row, prior, index)
            values.append(log_expectation_terms(q.T @ (root * mean), m, torch.ones_like(m)).sum())
        return torch.stack(values)

    def transport(self, draws: Tensor, c: Tensor, prior: Prior, shift: bool) -> Tensor:
        """δ_d = δ + Σ_{·A} Σ_AA⁻¹ (T − I) δ_A with T Σ_AA Tᵀ = (Σ_AA⁻¹ − C)⁻¹; shift: μ_d = μ + Σ_{·A} … μ_A."""
        index, groups, eigenvalues, vectors = self._aware(prior)
        if len(groups) == 1:
            inside = eigenvalues.clamp_max(float(prior.sigma0[groups[0]]) ** 2)
            m, root, q = inside * c[groups[0]], c[groups[0]].sqrt().expand(len(index)), vectors
            contraction = torch.where(eigenvalues > 0, inside / eigenvalues, 1.0)
        else:
            root, m, q = self._scaled_eigen(c, prior, index)
            contraction = torch.ones_like(m)
        # Σ_AA⁻¹ (T − I) = C^½ Q diag((1/√(1−m) − 1)/m) Qᵀ C^½, and (1/√(1−m) − 1)/m = 1/(√(1−m)(1 + √(1−m)))
        s = (1 - m).sqrt()
        deviation = (draws - self.mean).double()
        coefficient = ((deviation[:, index] * root) @ q) / (s * (1 + s))
        if shift:
            coefficient = coefficient + ((self.mean.double()[index] * root) @ q) / (1 - m)
        move = (coefficient * contraction) @ q.T * root
        return (draws + move @ self.covariance.double()[index]).to(draws.dtype)

    def variance_of(self, jacobian: Tensor) -> Tensor:
        """diag(J Σ Jᵀ) in the eigenbasis."""
        eigenvalues, vectors = self._eigen(torch.arange(len(self.mean)))
        return (jacobian.double() @ vectors).square() @ eigenvalues.clamp_min(0)

    def forms(self, index: Tensor, weights: Tensor) -> Tensor:
        """Quadratic forms A (K, D, D) of a layer's features φ: φᵀ A_k φ = Σ_ce W_kce Cov(θ_cᵀ φ, θ_eᵀ φ).

        Args:
            index: positions of the layer's rows θ_c in the flat vector, (C, D).
            weights: W, (K, C, C).
        """
        key = _key(index), _key(weights)
        if key not in self._forms:
            flat = index.flatten()
            blocks = self.covariance.double()[flat][:, flat].unflatten(1, index.shape).unflatten(0, index.shape)
            self._forms[key] = torch.einsum("kce,cdef->kdf", weights, blocks)
        return self._forms[key]

    def directions(self, prior: Prior, group: int) -> Eigenvectors:
        """The eigenvectors of Σ_AA."""
        index, groups, eigenvalues, vectors = self._aware(prior)
        if groups != [group]:
            raise ValueError(
                "The closed form of Transport with a full covariance needs one distance-aware group, got "
                f"{len(groups)}; use Transport(drawn=True), or one prior scale and one distance factor"
            )
        eigenvalues = eigenvalues.clamp_min(0)
        root = torch.where(eigenvalues > 0, eigenvalues.rsqrt(), 0.0)
        return Eigenvectors(eigenvalues, self.covariance.double()[:, index] @ vectors * root)

    def _aware(self, prior: Prior) -> tuple[Tensor, list[int], Tensor, Tensor]:
        """Indices of A, its groups, and the eigenpairs of Σ_AA."""
        groups = [g for g in range(len(prior.labels)) if prior.factor[g] > 0]
        index = torch.nonzero(prior.factor[prior.group] > 0).flatten()
        return index, groups, *self._eigen(index)

    def _eigen(self, index: Tensor) -> tuple[Tensor, Tensor]:
        key = _key(index)
        if key not in self._eigenpairs:
            self._eigenpairs[key] = torch.linalg.eigh(self.covariance.double()[index][:, index])
        return self._eigenpairs[key]

    def _scaled_eigen(self, c: Tensor, prior: Prior, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        root = c[prior.group[index]].sqrt()
        m, q = torch.linalg.eigh(root[:, None] * self.covariance.double()[index][:, index] * root)
        if m.max() >= 1:
            raise ValueError(
                "The covariance is wider than the prior in a direction that mixes the parameter groups "
                f"{[prior.labels[g] for g in range(len(prior.labels)) if prior.factor[g] > 0]}: the distance-aware "
                "posterior does not exist there; use one group, or a smaller factor on the distance"
            )
        return root, m.clamp_min(0), q


def _key(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


@dataclass(frozen=True, eq=False)
class Eigenvectors:
    """Eigenvectors of Σ_AA as directions; other parameters follow by their covariance with A."""

    variance: Tensor  # (R,)
    factor: Tensor  # (P, R), Σ_{·A} U diag(λ)^(−½)

    def energy(self, jacobian: Tensor) -> Tensor:
        """(J Σ_{·A} u_i)²/λ_i, (N, L, R)."""
        return (jacobian.double() @ self.factor).square()
