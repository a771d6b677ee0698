"""Class means and covariances of features that can always be inverted: shrunk, factored, in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 4096  # rows that are centred at once
JITTER = 1e-9  # of the mean variance: what every direction has at least


class Classes(NamedTuple):
    """The classes that occur."""

    means: Tensor  # (C, P), float64
    counts: Tensor  # (C,)
    members: Tensor  # (N,) which of them every row belongs to


def class_means(features: Tensor, labels: Tensor) -> Classes:
    """Mean feature vector of every class that has a training input."""
    _, members, counts = labels.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), features.shape[1], dtype=torch.float64, device=features.device)
    for block, member in zip(features.split(BLOCK), members.split(BLOCK), strict=True):
        sums.index_add_(0, member, block.double())
    return Classes(sums / counts[:, None], counts, members)


def shrunk_covariance(features: Tensor, means: Tensor, members: Tensor, shrinkage: float | None = None) -> Tensor:
    """(1 − ρ) S + ρ (tr S/P) I with S = Σ_n x_n x_nᵀ/N of the rows about their means, (P, P).

    By default ρ = min(1, Σ_n ‖x_n x_nᵀ − S‖² / (N² ‖S − (tr S/P) I‖²)), which minimises the expected squared error
    (Ledoit, Wolf 2004, A well-conditioned estimator for large-dimensional covariance matrices).

    Args:
        features: (N, P).
        means: (C, P).
        members: which mean belongs to which row, (N,).
        shrinkage: ρ; 0 is the sample covariance.
    """
    if shrinkage is not None and not 0 <= shrinkage <= 1:
        raise ValueError(f"Expected `shrinkage` between 0 and 1 (or None for Ledoit-Wolf), got {shrinkage}")
    n, p = features.shape
    covariance, fourth, size = means.new_zeros(p, p), means.new_zeros(()), means.new_zeros(())
    for block, member in zip(features.split(BLOCK), members.split(BLOCK), strict=True):
        centred = block.double() - means[member]
        covariance += centred.T @ centred / n
        fourth += (centred**2).sum(1).square().sum() / n
        size += block.double().square().sum() / n
    if covariance.trace() <= 1e-28 * size:  # equal rows, but for the rounding of their mean
        return torch.zeros_like(covariance)
    variance, identity = covariance.trace() / p, torch.eye(p, dtype=means.dtype, device=means.device)
    if shrinkage is None:
        noise = (fourth - covariance.square().sum()).clamp_min(0) / n
        spread = (covariance - variance * identity).square().sum()
        shrinkage = float(noise / torch.maximum(noise, spread)) if noise > 0 else 0.0
    return (1 - shrinkage) * covariance + shrinkage * variance * identity


def cholesky(covariance: Tensor) -> Tensor:
    """L with L Lᵀ = Σ + j I, where j is the smallest of 1e-9, 1e-8, … mean variances that works; I for Σ = 0."""
    identity = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    variance = covariance.trace() / len(covariance)
    if variance == 0:
        return identity
    for exponent in range(10):
        factor, failed = torch.linalg.cholesky_ex(covariance + JITTER * 10**exponent * variance * identity)
        if not failed:
            return factor
    raise ValueError("Expected the covariance of finite features, got one without a Cholesky factor; check their scale")


def squared_distances(points: Tensor, means: Tensor, factor: Tensor) -> Tensor:
    """(z − μ_c)ᵀ (L Lᵀ)⁻¹ (z − μ_c), (N, C): whitened points against whitened means."""
    white, centres = (torch.linalg.solve_triangular(factor, rows.double().T, upper=False).T for rows in (points, means))
    return torch.stack([(white - centre).square().sum(1) for centre in centres], 1)
