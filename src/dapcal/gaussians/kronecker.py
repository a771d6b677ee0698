"""N(μ, Σ) with Kronecker-factored blocks: a layer's weight matrix has independent entries in rotated coordinates.

A block of parameters, laid out as a matrix X (rows, columns), has covariance (U ⊗ V) diag(σ²) (U ⊗ V)ᵀ: in Uᵀ X V every
entry is independent. So the whole vector is a diagonal Gaussian after one rotation, which is all that log Z and
Transport need. Parameters outside the blocks are independent as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dapcal.gaussians.base import check_mean
from dapcal.gaussians.diagonal import Coordinates, DiagonalGaussian
from dapcal.prior import Prior
from dapcal.storing import Stores


@dataclass(frozen=True, eq=False)
class Block:
    """Parameters that form a matrix, and the orthonormal bases of its rows and columns."""

    stores = Stores()

    index: Tensor  # (rows, columns) positions in the flat parameter vector
    left: Tensor  # (rows, rows) eigenvectors U, in columns
    right: Tensor  # (columns, columns) eigenvectors V, in columns


@dataclass(frozen=True, eq=False)
class KroneckerGaussian:
    """N(μ, Σ), diagonal in rotated coordinates.

    Attributes:
        mean: μ, in the parameters' own coordinates.
        variance: along the rotated coordinates, where (Uᵀ X V)[i, j] takes the place of X[i, j].
        blocks: disjoint blocks; a parameter in none of them is its own coordinate.
    """

    stores = Stores()

    mean: Tensor  # (P,)
    variance: Tensor  # (P,)
    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        check_mean(self.mean)
        if self.variance.shape != self.mean.shape:
            raise ValueError(
                f"Expected `mean` and `variance` of one shape (P,), got {tuple(self.mean.shape)} and "
                f"{tuple(self.variance.shape)}"
            )
        if not (self.variance >= 0).all() or not self.variance.isfinite().all():
            raise ValueError("Expected finite variances >= 0; check the posterior's moments")
        for number, block in enumerate(self.blocks):
            shape = tuple(block.index.shape)
            if (tuple(block.left.shape), tuple(block.right.shape)) != ((shape[0],) * 2, (shape[1],) * 2):
                raise ValueError(
                    f"Expected bases of shapes {(shape[0],) * 2} and {(shape[1],) * 2} for block {number} of shape "
                    f"{shape}, got {tuple(block.left.shape)} and {tuple(block.right.shape)}"
                )
        taken = torch.cat([block.index.flatten() for block in self.blocks]) if self.blocks else torch.empty(0)
        if len(taken.unique()) != len(taken):
            raise ValueError("Expected disjoint blocks, but some parameter is in two of them")

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draws (n, P)."""
        noise = torch.randn(n, len(self.mean), generator=generator, dtype=self.mean.dtype).to(self.mean.device)
        return (self.mean + self.rotated(noise * self.variance.sqrt(), back=True)).to(self.mean.dtype)

    def narrowed(self, share: float) -> KroneckerGaussian:
        """N(μ, share² Σ)."""
        return replace(self, variance=share**2 * self.variance)

    def contracted(self, prior: Prior) -> int:
        """Number of rotated directions wider than σ0 among the distance-aware ones."""
        self.check(prior)
        return self._rotated.contracted(prior)

    def log_expectation(self, c: Tensor, prior: Prior) -> Tensor:
        """log Z(c), (M,), in the rotated coordinates."""
        self.check(prior)
        return self._rotated.log_expectation(c, prior)

    def transport(self, draws: Tensor, c: Tensor, prior: Prior, shift: bool) -> Tensor:
        """As for a diagonal Gaussian, in the rotated coordinates."""
        self.check(prior)
        moved = self._rotated.transport(self.rotated(draws.double()), c, prior, shift)
        return self.rotated(moved, back=True).to(draws.dtype)

    def variance_of(self, jacobian: Tensor) -> Tensor:
        """As for a diagonal Gaussian, in the rotated coordinates."""
        return self._rotated.variance_of(self.rotated(jacobian))

    def directions(self, prior: Prior, group: int) -> RotatedCoordinates:
        """The rotated coordinates of the group."""
        self.check(prior)
        return RotatedCoordinates(self, self._rotated.directions(prior, group))

    def rotated(self, vectors: Tensor, back: bool = False) -> Tensor:
        """Vectors (..., P) in rotated coordinates, or `back` from them."""
        result = vectors.clone()
        for block in self.blocks:
            flat = block.index.flatten()
            matrix = vectors[..., flat].reshape(*vectors.shape[:-1], *block.index.shape)
            u, v = block.left.to(vectors.dtype), block.right.to(vectors.dtype)
            turned = u @ matrix @ v.T if back else u.T @ matrix @ v
            result[..., flat] = turned.flatten(-2)
        return result

    @cached_property
    def _rotated(self) -> DiagonalGaussian:
        return DiagonalGaussian(self.rotated(self.mean.double()), self.variance.double())

    def check(self, prior: Prior) -> None:
        """A rotation mixes a block's parameters, so they must share one prior."""
        for block in self.blocks:
            groups = prior.group[block.index].unique()
            if len(groups) > 1:
                raise ValueError(
                    "A Kronecker-factored layer is rotated as a whole, but its parameters are in several groups of the "
                    f"prior: {[prior.labels[g] for g in groups.tolist()]}; fit the posterior with that prior, or give "
                    "the layer one prior scale and one distance factor"
                )


@dataclass(frozen=True, eq=False)
class RotatedCoordinates:
    """Rotated coordinates as directions."""

    gaussian: KroneckerGaussian
    coordinates: Coordinates

    @property
    def variance(self) -> Tensor:
        """λ, (R,)."""
        return self.coordinates.variance

    def energy(self, jacobian: Tensor) -> Tensor:
        """J_i² σ_i² in the rotated coordinates, (N, L, R)."""
        return self.coordinates.energy(self.gaussian.rotated(jacobian))
