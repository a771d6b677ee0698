"""Ranks: AUROC, and ranks in which ties share their mean."""

from __future__ import annotations

import torch
from torch import Tensor


def auroc(positive: Tensor, negative: Tensor) -> float:
    """P(positive > negative) + ½ P(equal).

    >>> auroc(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0]))
    0.875
    """
    ordered = negative.sort().values
    below = torch.searchsorted(ordered, positive, right=False)
    upto = torch.searchsorted(ordered, positive, right=True)
    return float((below + upto).double().mean() / (2 * len(negative)))


def ranks_of(values: Tensor) -> Tensor:
    """Ranks; ties share their mean rank."""
    ordered = values.sort().values
    return (torch.searchsorted(ordered, values) + torch.searchsorted(ordered, values, right=True)).double()
