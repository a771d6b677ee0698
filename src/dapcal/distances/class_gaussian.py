"""Distance to the nearest class: one Gaussian a class, all of one covariance."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dapcal.distances.covariance import cholesky, class_means, shrunk_covariance
from dapcal.storing import Stores

_ROWS = 512  # points whose copy in float64 stays close to a core
_STEPS, _NARROWEST = 5, 32  # products that leave out what is 0, and rows of one at least


@dataclass(frozen=True)
class ClassGaussian:
    """Recipe: min_k √((z − μ_k)ᵀ Σ⁻¹ (z − μ_k)), with class means μ_k and one shrunk covariance Σ within classes.

    Lee, Lee, Lee, Shin (2018), arXiv:1807.03888; on normalised features, `Space(Features(unit=True), ClassGaussian())`,
    it is Mahalanobis++ (Müller, Hein 2025, arXiv:2505.18032). Memory: P² float64
    numbers for points of P dimensions.

    Args:
        shrinkage: of Σ towards a multiple of I; by default Ledoit-Wolf's, 0 is the sample covariance.
    """

    shrinkage: float | None = None

    def fit_metric(self, points: Tensor, y: Tensor | None) -> NearestClass:
        """Fit to training points (T, P) and their classes (T,)."""
        if y is None:
            raise ValueError(
                "ClassGaussian needs the classes of the training inputs; pass them, "
                "space.fit(train, held_out, posterior, y), or use dapcal.distances.nearest"
            )
        if y.shape != points.shape[:1] or y.is_floating_point():
            raise ValueError(
                f"ClassGaussian is for classification: expected class labels ({len(points)},) as whole numbers, got "
                f"{tuple(y.shape)} of {y.dtype}; use dapcal.distances.nearest for other targets"
            )
        means, _, members = class_means(points, y.to(points.device))
        factor = cholesky(shrunk_covariance(points, means, members, self.shrinkage))
        identity = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
        whitening = torch.linalg.solve_triangular(factor, identity, upper=False)
        return NearestClass(whitening, means @ whitening.T)


@dataclass(frozen=True, eq=False)
class NearestClass:
    """min_k ‖L⁻¹z − L⁻¹μ_k‖ with L Lᵀ = Σ; a set counts by its farthest point.

    Training inputs are not at zero, but inside the radius like others of their distribution.
    """

    stores = Stores()

    whitening: Tensor  # L⁻¹, (P, P) in float64
    centers: Tensor  # L⁻¹μ_k, (K, P) in float64

    def __call__(self, points: Tensor) -> Tensor:
        """(N,)."""
        return torch.cat([self._of_block(block) for block in points.split(_ROWS)]).to(points.dtype)

    def joint(self, points: Tensor) -> Tensor:
        """Scalar."""
        return self(points).max()

    def _of_block(self, points: Tensor) -> Tensor:
        points = points.to(self.whitening)
        white = torch.empty_like(points)
        for rows, columns in self._steps:
            torch.mm(points[:, :columns], self.whitening[rows, :columns].T, out=white[:, rows])
        beside = torch.addmm(self._squared_centers, white, self.centers.T, alpha=-2)  # |c|² − 2 w·c, in float64
        return (beside.amin(1) + white.square().sum(1)).clamp_min(0).sqrt()

    @cached_property
    def _steps(self) -> list[tuple[slice, int]]:
        """Some rows of L⁻¹ at a time, and the columns beyond which they are 0: above its diagonal it is."""
        size = len(self.whitening)
        step = max(_NARROWEST, -(-size // _STEPS))
        parts = [slice(start, min(start + step, size)) for start in range(0, size, step)]
        return [(rows, _last(self.whitening[rows])) for rows in parts]

    @cached_property
    def _squared_centers(self) -> Tensor:
        return self.centers.square().sum(1)


def _last(rows: Tensor) -> int:
    """How many columns there are up to the last that is not 0 throughout; one at least."""
    return max(1, int((rows != 0).any(0).nonzero().amax()) + 1 if bool(rows.any()) else 1)
