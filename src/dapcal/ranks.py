"""Ranks: AUROC and rank correlation, and how sure they are."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def auroc(positive: Tensor, negative: Tensor) -> float:
    """P(positive > negative) + ½ P(equal).

    >>> auroc(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0]))
    0.875
    """
    return float(_share_below(positive, negative).mean())


def auroc_error(positive: Tensor, negative: Tensor) -> float:
    """Standard error of the AUROC: that of DeLong, DeLong, Clarke-Pearson (1988), or of equal distributions if larger.

    Theirs is 0 where the two are separated, however few they are; √((m + n + 1)/(12 m n)) is what it would be if they
    were not.
    """
    m, n = len(positive), len(negative)
    equal = (m + n + 1) / (12 * m * n)
    if min(m, n) < 2:
        return math.sqrt(equal)
    placed = _share_below(positive, negative).var() / m + _share_below(negative, positive).var() / n
    return math.sqrt(max(equal, float(placed)))


def rank_correlation(one: Tensor, two: Tensor) -> float:
    """Spearman's ρ; 0 where it is not defined."""
    ranks = torch.stack([ranks_of(one), ranks_of(two)])
    if ranks.shape[1] < 3 or not (ranks.var(1) > 0).all():
        return 0.0
    return float(torch.corrcoef(ranks)[0, 1].clamp(-1, 1))


def least_correlation(rho: float, n: int, deviations: float) -> float:
    """Lower bound of a rank correlation ρ of n pairs: tanh(artanh ρ − z √((1 + ρ²/2)/(n − 3))).

    Fisher's transformation with the standard error of Bonett, Wright (2000) for ranks.
    """
    if n <= 3:
        return -1.0
    z = math.atanh(min(max(rho, -1 + 1e-12), 1 - 1e-12))
    return math.tanh(z - deviations * math.sqrt((1 + rho**2 / 2) / (n - 3)))


def ranks_of(values: Tensor) -> Tensor:
    """Ranks; ties share their mean rank."""
    ordered = values.sort().values
    return (torch.searchsorted(ordered, values) + torch.searchsorted(ordered, values, right=True)).double()


def _share_below(values: Tensor, others: Tensor) -> Tensor:
    """For every value the share of others below it, ties by half, (N,)."""
    ordered = others.sort().values
    upto = torch.searchsorted(ordered, values) + torch.searchsorted(ordered, values, right=True)
    return upto.double() / (2 * len(others))
