"""What predictions of several labels an input are judged by, label by label and all together.

Tensors of probabilities (N, L) and of zeros and ones (N, L) go in. A label that is there everywhere or nowhere has no
AUROC: NaN, which the macro average leaves out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.metrics import expected_calibration_error
from dapcal.ranks import auroc


class LabelMetrics(NamedTuple):
    """One entry for every label; `macro` is their mean."""

    nll: tuple[float, ...]
    accuracy: tuple[float, ...]
    brier: tuple[float, ...]  # (p − y)²
    calibration_error: tuple[float, ...]  # expected, of the confidence in what is more likely
    f1: tuple[float, ...]  # at 1/2; 0 where the label is neither there nor predicted
    auroc: tuple[float, ...]  # of the probability for inputs that have the label

    @property
    def macro(self) -> dict[str, float]:
        """Means over labels, by name."""
        named = {name: [value for value in values if not math.isnan(value)] for name, values in self._asdict().items()}
        return {name: sum(values) / len(values) if values else math.nan for name, values in named.items()}


def per_label(probs: Tensor, y: Tensor, bins: int = 15) -> LabelMetrics:
    """Each label by itself.

    >>> found = per_label(torch.tensor([[0.9, 0.2], [0.2, 0.6]]), torch.tensor([[1, 0], [0, 0]]))
    >>> found.accuracy, round(found.macro["brier"], 4)
    ((1.0, 0.5), 0.1125)
    """
    probs, y = _checked(probs, y)
    rows = [_of_one(p, truth, bins) for p, truth in zip(probs.T, y.T, strict=True)]
    return LabelMetrics(*map(tuple, zip(*rows, strict=True)))


def subset_accuracy(probs: Tensor, y: Tensor) -> float:
    """Share of inputs with all labels right (exact match)."""
    probs, y = _checked(probs, y)
    return float(((probs > 0.5) == y).all(1).double().mean())


def hamming_loss(probs: Tensor, y: Tensor) -> float:
    """Share of wrong labels, over inputs and labels."""
    probs, y = _checked(probs, y)
    return float(((probs > 0.5) != y).double().mean())


def _of_one(p: Tensor, y: Tensor, bins: int) -> tuple[float, ...]:
    there = p > 0.5
    tiny = torch.finfo(p.dtype).tiny
    hit = int((there & y).sum())
    either = int(there.sum()) + int(y.sum())
    both = torch.stack([1 - p, p], 1)
    return (
        float(-torch.where(y, p, 1 - p).clamp_min(tiny).log().mean()),
        float((there == y).double().mean()),
        float((p - y.double()).square().mean()),
        expected_calibration_error(both, y.long(), bins),
        2 * hit / either if either else 0.0,
        auroc(p[y], p[~y]) if y.any() and not y.all() else math.nan,
    )


def _checked(probs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if probs.ndim != 2 or y.shape != probs.shape or len(y) == 0:
        raise ValueError(
            f"Expected `probs` and `y` of one shape (N, L), at least one input, got {tuple(probs.shape)} and "
            f"{tuple(y.shape)}"
        )
    if not bool(((y == 0) | (y == 1)).all()):
        raise ValueError("Expected `y` as zeros and ones, got others; classes are for dapcal.metrics")
    if not bool(((probs >= 0) & (probs <= 1)).all()):
        raise ValueError("Expected `probs` between 0 and 1, got others or NaN; give probabilities, not logits")
    return probs.detach().cpu().double(), y.detach().cpu().bool()
