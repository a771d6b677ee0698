"""Curvature of the log-likelihood over a network's parameters, and the Gaussians that it makes with a prior.

Both curvatures are sums over training inputs of (Jᵀ R)(Jᵀ R)ᵀ with a root R (C, M) in output space: the generalised
Gauss–Newton matrix takes a root of the Fisher information of p(y | outputs), the empirical Fisher the gradient at the
observed target. Each structure keeps what it needs of that sum, so that any prior scale is cheap to try.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from dapcal.gaussians import Block, DiagonalGaussian, FullGaussian, KroneckerGaussian
from dapcal.likelihoods import Likelihood


class Root(Protocol):
    """R (N, C, M) in output space at outputs (N, C) and checked targets."""

    def __call__(self, likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Tensor:
        """The root."""
        ...


def ggn(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Tensor:  # noqa: ARG001
    """Generalised Gauss–Newton: R Rᵀ is the Fisher information, whatever the target."""
    return likelihood.curvature_root(outputs)


def empirical_fisher(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Tensor:
    """Empirical Fisher: the gradient of log p(y | outputs), one column."""
    with torch.enable_grad():
        outputs = outputs.detach().requires_grad_()
        return torch.autograd.grad(likelihood.log_likelihood(outputs, y).sum(), outputs)[0][..., None]


class Curvature(Protocol):
    """The curvature H of one structure."""

    def gaussian(self, mean: Tensor, precision: Tensor) -> DiagonalGaussian | KroneckerGaussian | FullGaussian:
        """N(mean, (H + diag precision)⁻¹) for prior precisions (P,)."""
        ...

    def log_determinant(self, precision: Tensor) -> Tensor:
        """log det(H + diag precision)."""
        ...


@dataclass(frozen=True, eq=False)
class Diagonal:
    """The diagonal of H."""

    diagonal: Tensor  # (P,) float64

    def __post_init__(self) -> None:
        _check_finite(self.diagonal)

    def gaussian(self, mean: Tensor, precision: Tensor) -> DiagonalGaussian:
        """Independent parameters."""
        return DiagonalGaussian(mean, (1 / (self.diagonal + precision)).to(mean.dtype))

    def log_determinant(self, precision: Tensor) -> Tensor:
        """Σ log(h + δ)."""
        return torch.log(self.diagonal + precision).sum()


@dataclass(frozen=True, eq=False)
class Full:
    """All of H; memory and time grow with P² and P³."""

    matrix: Tensor  # (P, P) float64

    def __post_init__(self) -> None:
        _check_finite(self.matrix)

    def gaussian(self, mean: Tensor, precision: Tensor) -> FullGaussian:
        """All parameters together."""
        # an eigendecomposition, not a Cholesky factor: H may be singular to rounding
        if bool((precision == precision[0]).all()):
            values, vectors = self._eigenpairs[0] + precision[0], self._eigenpairs[1]
        else:
            values, vectors = torch.linalg.eigh(self.matrix + torch.diag(precision))
            values = values.clamp_min(float(precision.min()))
        covariance = (vectors / values) @ vectors.T
        # in float64: rounded to float32, the widest directions would swamp the narrow ones
        return FullGaussian(mean, (covariance + covariance.T) / 2, checked=True)

    def log_determinant(self, precision: Tensor) -> Tensor:
        """By eigenvalues where one precision serves all, so that trying another costs nothing."""
        if bool((precision == precision[0]).all()):
            return torch.log(self._eigenpairs[0] + precision[0]).sum()
        return torch.linalg.slogdet(self.matrix + torch.diag(precision)).logabsdet

    @cached_property
    def _eigenpairs(self) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self.matrix)
        return values.clamp_min(0), vectors


@dataclass(frozen=True, eq=False)
class Factors:
    """H of one layer, about G ⊗ A, by eigendecompositions."""

    index: Tensor  # (rows, columns) positions in the flat vector
    left: Tensor  # (rows, rows) eigenvectors of G
    right: Tensor  # (columns, columns) eigenvectors of A
    values: Tensor  # (rows, columns) products of eigenvalues


@dataclass(frozen=True, eq=False)
class Kronecker:
    """G ⊗ A for every linear and convolutional layer (Martens and Grosse 2015), the diagonal for all else."""

    layers: tuple[Factors, ...]
    diagonal: Tensor  # (P,) float64, of the parameters that are in no layer

    def __post_init__(self) -> None:
        _check_finite(self.diagonal)

    def gaussian(self, mean: Tensor, precision: Tensor) -> KroneckerGaussian:
        """Independent along the layers' eigenvectors."""
        blocks = tuple(Block(f.index, f.left, f.right) for f in self.layers)
        return KroneckerGaussian(mean, (1 / (self._rotated + precision)).to(mean.dtype), blocks)

    def log_determinant(self, precision: Tensor) -> Tensor:
        """Σ log(h + δ) along the eigenvectors; a layer shares one precision."""
        return torch.log(self._rotated + precision).sum()

    @cached_property
    def _rotated(self) -> Tensor:
        values = self.diagonal.clone()
        for layer in self.layers:
            values[layer.index] = layer.values
        return values


def factors(index: Tensor, left: Tensor, right: Tensor, rows: int) -> Factors:
    """G ⊗ A/rows from the sums G = Σ g gᵀ and A = Σ a aᵀ over `rows` inputs and places, decomposed."""
    _check_finite(left)
    _check_finite(right)
    (left_values, u), (right_values, v) = torch.linalg.eigh(left), torch.linalg.eigh(right / rows)
    # eigh gives its vectors by columns; a file gives them back by rows, and products would round differently
    values = left_values.clamp_min(0)[:, None] * right_values.clamp_min(0)
    return Factors(index, u.contiguous(), v.contiguous(), values)


def _check_finite(total: Tensor) -> None:
    """Squares of large numbers overflow, and no Gaussian follows from what is left of them."""
    if not total.isfinite().all():
        raise ValueError(
            "The curvature over the training inputs is too large for its numbers (inf or NaN), as inputs, features or "
            "weights are; scale inputs and targets to about 1, and train the network again"
        )
