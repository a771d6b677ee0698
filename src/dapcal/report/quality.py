"""How good predictions are on held-out data, before and after: errors, calibration, selective risk."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.special import ndtr, ndtri

from dapcal import metrics
from dapcal.report.predictions import Answers, Predicted

BINS = 10
LEVELS = tuple(round(0.05 * step, 2) for step in range(1, 20))
_REPEATS = 200


class Risk(NamedTuple):
    """Mean loss among the least doubtful share of inputs: the error rate, or the root mean square error."""

    kept: tuple[float, ...]
    risk: tuple[float, ...]


class ClassQuality(NamedTuple):
    """Of class probabilities."""

    accuracy: float
    confidence: float  # mean largest probability
    nll: float
    brier: float
    ece: float
    ece_by_chance: tuple[float, float]  # if confidences were exactly right: on average, and in 95 % of cases at most
    bin_confidence: tuple[float, ...]  # NaN where a bin is empty
    bin_accuracy: tuple[float, ...]
    bin_counts: tuple[int, ...]
    risk: Risk


class NumberQuality(NamedTuple):
    """Of Gaussian predictions, all as people see the target."""

    rmse: float
    crps: float
    nll: float
    coverage: float  # of 95 % intervals
    width: float  # of 95 % intervals, mean
    observed: tuple[float, ...]  # coverage at `LEVELS`
    pit_counts: tuple[int, ...]  # targets by the decile of their predictive distribution
    risk: Risk


class ComparedClasses(NamedTuple):
    """Class probabilities before and after."""

    before: ClassQuality
    after: ClassQuality


class ComparedNumbers(NamedTuple):
    """Gaussian predictions before and after."""

    before: NumberQuality
    after: NumberQuality


def compare(predicted: Predicted, y: Tensor, scale: float | None) -> ComparedClasses | ComparedNumbers:
    """Quality before and after; `scale` is that of the targets as people see them, None for classes."""
    y = y.cpu()
    both = (predicted.before, predicted.after)
    if scale is None:
        return ComparedClasses(*(class_quality(answers, y.reshape(len(y)).long()) for answers in both))
    y = y.reshape(predicted.after.mean.shape)
    return ComparedNumbers(*(number_quality(answers, y, scale) for answers in both))


def class_quality(answers: Answers, y: Tensor) -> ClassQuality:
    """Of probabilities (N, K) for labels (N,)."""
    probs = answers.mean
    confidence, label = probs.max(-1)
    diagram = metrics.reliability(probs, y, BINS)
    return ClassQuality(
        accuracy=metrics.accuracy(probs, y),
        confidence=float(confidence.mean()),
        nll=float(-answers.log_prob.mean()),
        brier=metrics.brier(probs, y),
        ece=metrics.expected_calibration_error(probs, y, BINS),
        ece_by_chance=_ece_by_chance(confidence),
        bin_confidence=tuple(diagram.confidence.tolist()),
        bin_accuracy=tuple(diagram.accuracy.tolist()),
        bin_counts=tuple(diagram.counts.tolist()),
        risk=_risk(1 - confidence, (label != y).double()),
    )


def number_quality(answers: Answers, y: Tensor, scale: float) -> NumberQuality:
    """Of means and variances (N, K) for targets (N, K), which people see times `scale`."""
    mean, variance = answers.mean, answers.variance
    y, size = y.double(), abs(scale)

    def interval(level: float) -> tuple[Tensor, Tensor]:
        half = ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)) * variance.sqrt()
        return mean - half, mean + half

    pit = ndtr((y - mean) / variance.sqrt()).flatten()
    risk = _risk(variance.mean(-1), ((y - mean) ** 2).mean(-1))
    return NumberQuality(
        rmse=size * metrics.rmse(mean, y),
        crps=size * metrics.crps_gaussian(mean, variance, y),
        nll=float(-answers.log_prob.mean()) + y.shape[1] * math.log(size),  # a density in the target's unit
        coverage=metrics.coverage(*interval(0.95), y),
        width=size * metrics.mean_width(*interval(0.95)),
        observed=tuple(metrics.coverage(*interval(level), y) for level in LEVELS),
        pit_counts=tuple(torch.histc(pit, BINS, 0, 1).long().tolist()),
        risk=Risk(risk.kept, tuple(size * math.sqrt(value) for value in risk.risk)),
    )


def _risk(doubt: Tensor, loss: Tensor) -> Risk:
    curve = metrics.selective_risk(doubt, loss)
    return Risk(tuple(curve.coverage.tolist()), tuple(curve.risk.tolist()))


def _ece_by_chance(confidence: Tensor) -> tuple[float, float]:
    """Mean and 95 % quantile of the expected calibration error when each confidence is right exactly that often."""
    generator = torch.Generator().manual_seed(0)
    confidence = confidence.clamp(0, 1)
    index = torch.bucketize(confidence, torch.linspace(0, 1, BINS + 1, dtype=torch.float64)[1:-1])
    errors = []
    for _ in range(_REPEATS):
        right = (torch.rand(len(confidence), generator=generator, dtype=torch.float64) < confidence).double()
        errors.append(torch.bincount(index, right - confidence, minlength=BINS).abs().sum() / len(confidence))
    found = torch.stack(errors)
    return float(found.mean()), float(found.quantile(0.95))
