"""How far importance weights can be trusted: effective sample size, total weight, Pareto k̂."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.records import DapcalWarning, Ensemble

MIN_DRAWS = 25  # fewer leave under five draws in the tail
_CHUNK = 256


class Diagnostics(NamedTuple):
    """Per input, except `contracted`."""

    ess: Tensor  # (N,) effective number of draws, between 1 and S
    total_weight: Tensor  # (N,) W = mean weight; 1 for a proper distribution
    pareto_k: Tensor  # (N,) NaN for equal weights or fewer than 25 draws
    contracted: int  # distance-aware directions wider than the prior, taken as σ0


def importance_of(ensemble: Ensemble) -> Tensor:
    """The log weights (S, N) that tell how far the draws can be trusted: before any normalisation or completion."""
    return ensemble.log_weights if ensemble.importance is None else ensemble.importance


def collapsed(ess: Tensor, k: Tensor, draws: int) -> Tensor:
    """Where weights of `draws` draws say nothing: few effective ones, or Pareto k̂ > 0.7, (N,)."""
    return (ess < min(draws / 2, max(2, draws / 10))) | (k > 0.7)


def effective_sample_size(log_weights: Tensor) -> Tensor:
    """(Σ w)²/Σ w² for log weights (S, N), (N,).

    >>> effective_sample_size(torch.zeros(10, 1)).item()
    10.0
    """
    scaled = (log_weights - log_weights.max(0).values).exp()
    return scaled.sum(0) ** 2 / (scaled**2).sum(0)


def total_weight(log_weights: Tensor) -> Tensor:
    """Σ_s w_s for log weights that carry their 1/S, (N,)."""
    return torch.logsumexp(log_weights, 0).exp()


def pareto_k(log_weights: Tensor) -> Tensor:
    """Shape k̂ of a generalised Pareto distribution fitted to the largest weights (Vehtari et al. 2024), (N,).

    Above 0.7 the weighted mean is not to be trusted.
    """
    return pareto_smooth(log_weights)[1]


def pareto_smooth(log_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Replace the largest weights by the order statistics of a fitted generalised Pareto distribution.

    Unlike the usual PSIS the weights keep their scale: they are not renormalised.

    Args:
        log_weights: (S, N).

    Returns:
        Smoothed log weights (S, N) and k̂ (N,). Inputs with equal weights, or fewer than 25 draws, are left as they
        are, with k̂ = NaN.
    """
    draws, n = log_weights.shape
    if draws < MIN_DRAWS:
        return log_weights, torch.full((n,), torch.nan, dtype=log_weights.dtype, device=log_weights.device)
    found = [_smooth_block(block) for block in log_weights.split(_CHUNK, 1)]
    return torch.cat([w for w, _ in found], 1), torch.cat([k for _, k in found])


def _smooth_block(log_weights: Tensor) -> tuple[Tensor, Tensor]:
    draws = len(log_weights)
    tail = int(3 * draws**0.5) if draws > 225 else draws // 5
    top = log_weights.max(0).values
    ordered, order = (log_weights - top).sort(dim=0, stable=True)
    largest = ordered[-tail:]  # (M, N)
    cutoff = ordered[-tail - 1].exp()
    excess = largest.exp() - cutoff
    varies = largest[-1] - largest[0] > torch.finfo(largest.dtype).tiny
    fits = varies & (excess[_quarter(tail)] > 0)
    excess = torch.where(fits, excess, torch.linspace(0.1, 1, tail).to(excess)[:, None])
    k, sigma = _fit_pareto(excess)
    p = (torch.arange(tail, dtype=largest.dtype, device=largest.device) + 0.5)[:, None] / tail
    quantiles = cutoff + sigma * torch.expm1(-k * torch.log1p(-p)) / torch.where(k == 0, 1e-12, k)
    smooth = quantiles.log().clamp_max(0)  # never above the largest weight
    usable = fits & k.isfinite() & (sigma > 0)
    ordered = torch.cat([ordered[:-tail], torch.where(usable, smooth, largest)])
    smoothed = torch.empty_like(ordered).scatter(0, order, ordered) + top
    # a tail that varies by more than the exponent can hold has collapsed onto a few draws
    return smoothed, torch.where(fits & k.isfinite(), k, torch.where(varies, torch.inf, torch.nan))


def _quarter(n: int) -> int:
    return int(n / 4 + 0.5) - 1


def _fit_pareto(excess: Tensor) -> tuple[Tensor, Tensor]:
    """Empirical-Bayes fit of Zhang and Stephens (2009) to ascending excesses (M, N), with PSIS's prior on k."""
    n = len(excess)
    m = 30 + int(n**0.5)
    grid = torch.arange(1, m + 1, dtype=excess.dtype, device=excess.device)[:, None]
    b = (1 - (m / (grid - 0.5)).sqrt()) / (3 * excess[_quarter(n)]) + 1 / excess[-1]  # (m, N)
    k = torch.stack([torch.log1p(-row * excess).mean(0) for row in b])
    profile = n * ((-b / k).log() - k - 1)
    weights = profile.softmax(0)
    weights = torch.where(weights >= 10 * torch.finfo(weights.dtype).eps, weights, 0)
    b_mean = (b * weights).sum(0) / weights.sum(0)
    k_mean = torch.log1p(-b_mean * excess).mean(0)
    return (n * k_mean + 5) / (n + 10), -k_mean / b_mean


def warn_if_collapsed(ensemble: Ensemble) -> None:
    """Of whoever predicts with weights that say nothing."""
    weights = importance_of(ensemble)
    ess, k = effective_sample_size(weights), pareto_k(weights)
    count = int(collapsed(ess, k, len(weights)).sum())
    if count:
        warnings.warn(
            f"The importance weights have collapsed at {count} of {len(ess)} inputs (few effective draws or Pareto "
            "k̂ > 0.7): their reweighted prediction is not to be trusted. See prediction.diagnostics, and use "
            "adjust=Inflate(), or Transport() for a Gaussian posterior",
            DapcalWarning,
            stacklevel=4,
        )
