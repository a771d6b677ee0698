"""What predictions are judged by: detection, calibration, errors and intervals.

Tensors go in, plain floats come out; curves are small records of tensors on the CPU. Scores: higher = further out.
Detection needs scikit-learn (the extra `experiments`), the rest torch alone.

Class probabilities are taken as they are. Those of an importance-weighted posterior need not sum to one: the accuracy
looks at the largest, the Brier score and the calibration errors compare the numbers themselves with what happened.

Not torchmetrics (1.9 was tried): it puts scores beyond [0, 1] through a float32 sigmoid, so an AUROC of 0.664 becomes
0.578 where all scores are larger by 40, and probabilities over one through a softmax (a calibration error of 0.995
becomes 0.062). Elsewhere they agree to 1e-6, as the tests check; it imports no faster than scikit-learn, brings one
more package, and has no Brier score, bins of equal count, coverage of intervals or selective risk.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.special import ndtr

from dapcal.ranks import auroc

_MOST_POINTS = 101  # of a risk curve


class Detection(NamedTuple):
    """How well scores tell out-of-distribution inputs from others."""

    auroc: float  # P(outside > inside) + ½ P(equal)
    aucpr: float  # average precision, out-of-distribution inputs positive
    aucpr_inside: float  # average precision, in-distribution inputs positive and scores negated
    fpr95: float  # share of inside flagged when 95 % of outside are


class Reliability(NamedTuple):
    """What a reliability diagram shows, one entry per bin; NaN where a bin is empty."""

    confidence: Tensor  # mean largest probability
    accuracy: Tensor
    counts: Tensor


class RocCurve(NamedTuple):
    """Points on the ROC curve, from (0, 0) to (1, 1)."""

    false_positive_rate: Tensor
    true_positive_rate: Tensor


class PrecisionRecallCurve(NamedTuple):
    """Points on the precision–recall curve, recall from 0 to 1."""

    recall: Tensor
    precision: Tensor


class SelectiveRisk(NamedTuple):
    """Mean loss among the least doubtful share of inputs."""

    coverage: Tensor  # that share, ascending to 1
    risk: Tensor
    area: float  # mean risk over all coverages 1/N, ..., 1


def detection(inside: Tensor, outside: Tensor) -> Detection:
    """How well scores tell inputs outside the distribution from inputs inside it.

    An input is flagged where its score is at least a threshold. `fpr95` takes the largest threshold at which 95 % of
    `outside` are flagged, and is the share of `inside` that is flagged with them (out-of-distribution inputs are the
    positive class; the opposite convention keeps 95 % of `inside`). Equal scores fall on the same side.

    Args:
        inside: scores of in-distribution inputs (N,); infinite ones count as largest or smallest.
        outside: scores of out-of-distribution inputs (M,).
    """
    metrics = _sklearn()
    truth, ranks = _ranked(inside, outside)
    far = np.sort(ranks[truth])[::-1]
    threshold = far[-(-95 * len(far) // 100) - 1]
    return Detection(
        auroc=auroc(torch.from_numpy(ranks[truth]), torch.from_numpy(ranks[~truth])),
        aucpr=float(metrics.average_precision_score(truth, ranks)),
        aucpr_inside=float(metrics.average_precision_score(~truth, -ranks)),
        fpr95=float((ranks[~truth] >= threshold).mean()),
    )


def roc_curve(inside: Tensor, outside: Tensor, points: int = 201) -> RocCurve:
    """The ROC curve at `points` places, evenly spaced along it (in false plus true positive rate)."""
    _check_count(points, "points", 2)
    false, true, _ = _sklearn().roc_curve(*_ranked(inside, outside))
    places = np.linspace(0, 2, points)  # the curve is made of straight pieces, so every place lies on it
    return RocCurve(*(torch.from_numpy(np.interp(places, false + true, rate)) for rate in (false, true)))


def precision_recall_curve(inside: Tensor, outside: Tensor, points: int = 201) -> PrecisionRecallCurve:
    """Precision at `points` evenly spaced recalls: that of the largest threshold which reaches the recall.

    Between thresholds the curve is a step, as in the average precision: straight lines would be too optimistic (Davis
    and Goadrich, 2006).
    """
    _check_count(points, "points", 2)
    precision, recall, _ = _sklearn().precision_recall_curve(*_ranked(inside, outside))
    precision, recall = precision[-2::-1], recall[-2::-1]  # ascending, without the added point at recall 0
    places = np.linspace(0, 1, points)
    reached = np.searchsorted(recall, places - 1e-12)
    return PrecisionRecallCurve(torch.from_numpy(places), torch.from_numpy(precision[reached]))


def accuracy(probs: Tensor, y: Tensor) -> float:
    """Share of inputs whose most probable class is `y`."""
    probs, y = _classes(probs, y)
    return float((probs.argmax(-1) == y).double().mean())


def brier(probs: Tensor, y: Tensor) -> float:
    """Mean of Σ_k (p_k − 1[y = k])², between 0 and 2 for probabilities that sum to one (Brier, 1950)."""
    probs, y = _classes(probs, y)
    happened = torch.nn.functional.one_hot(y, probs.shape[-1])
    return float((probs - happened).square().sum(-1).mean())


def expected_calibration_error(probs: Tensor, y: Tensor, bins: int = 15) -> float:
    """Σ_b n_b/N · |accuracy_b − confidence_b| over bins of equal width (Guo et al., 2017, arXiv:1706.04599)."""
    return _mean_gap(reliability(probs, y, bins))


def adaptive_calibration_error(probs: Tensor, y: Tensor, bins: int = 15) -> float:
    """The same over bins of (almost) equal count, by the confidence in the most probable class.

    Bins as in Nguyen and O'Connor (2015, arXiv:1508.05154); Nixon et al. (2019, arXiv:1904.01685) also average over
    classes.
    """
    _check_count(bins, "bins", 1)
    confidence, correct = _top_label(probs, y)
    correct = _mean_over_ties(confidence, correct)
    order = confidence.argsort()
    parts = zip(confidence[order].tensor_split(bins), correct[order].tensor_split(bins), strict=True)
    gaps = [(c.sum() - a.sum()).abs() for c, a in parts]
    return float(torch.stack(gaps).sum() / len(confidence))


def reliability(probs: Tensor, y: Tensor, bins: int = 15) -> Reliability:
    """Confidence in the most probable class and how often it was right, in bins ((b − 1)/B, b/B] of confidence.

    Confidences over one, which weighted probabilities can have, go to the last bin.
    """
    _check_count(bins, "bins", 1)
    confidence, correct = _top_label(probs, y)
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1]
    index = torch.bucketize(confidence, edges)
    counts = torch.bincount(index, minlength=bins)
    return Reliability(
        confidence=torch.bincount(index, confidence, minlength=bins) / counts,
        accuracy=torch.bincount(index, correct, minlength=bins) / counts,
        counts=counts,
    )


def rmse(mean: Tensor, y: Tensor) -> float:
    """Root of the mean squared error, over inputs and targets."""
    mean, y = _alike(mean=mean, y=y)
    return math.sqrt(float((mean - y).square().mean()))


def crps_gaussian(mean: Tensor, variance: Tensor, y: Tensor) -> float:
    """Mean continuous ranked probability score of N(mean, variance), in units of the target.

    σ [z (2Φ(z) − 1) + 2φ(z) − 1/√π] with z = (y − mean)/σ; |y − mean| for σ = 0 (Gneiting and Raftery, 2007).
    """
    mean, variance, y = _alike(mean=mean, variance=variance, y=y)
    if (variance < 0).any():
        raise ValueError(f"Expected `variance` >= 0, got {float(variance.min()):.3g}; pass the square of a deviation")
    sigma, error = variance.sqrt(), y - mean
    z = error / sigma.clamp_min(torch.finfo(torch.float64).tiny)
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return float((error * (2 * ndtr(z) - 1) + sigma * (2 * density - 1 / math.sqrt(math.pi))).mean())


def coverage(lower: Tensor, upper: Tensor, y: Tensor) -> float:
    """Share of targets inside their intervals, ends included."""
    lower, upper, y = _alike(lower=lower, upper=upper, y=y)
    return float(((lower <= y) & (y <= upper)).double().mean())


def mean_width(lower: Tensor, upper: Tensor) -> float:
    """Mean width of intervals."""
    lower, upper = _alike(lower=lower, upper=upper)
    return float((upper - lower).mean())


def selective_risk(doubt: Tensor, loss: Tensor) -> SelectiveRisk:
    """Mean loss of the inputs that are kept when the most doubtful ones are handed on, for every share kept.

    risk(k/N) = 1/k Σ_{i ≤ k} loss_(i), ordered by doubt; equally doubtful inputs count by their mean loss, as in a
    random order. The area is the exact mean over k = 1, ..., N (AURC; Geifman et al., 2019, arXiv:1805.08206); the
    curve is thinned to 101 points.

    Args:
        doubt: higher = less sure, (N,).
        loss: of every input, say 1 where it is misclassified, (N,).
    """
    doubt, loss = _alike(doubt=doubt, loss=loss)
    n = len(doubt)
    kept = torch.arange(1, n + 1, dtype=torch.float64)
    risk = _mean_over_ties(doubt, loss)[doubt.argsort()].cumsum(0) / kept
    shown = torch.linspace(0, n - 1, min(n, _MOST_POINTS), dtype=torch.float64).round().long()
    return SelectiveRisk(kept[shown] / n, risk[shown], float(risk.mean()))


def _sklearn() -> ModuleType:
    try:
        from sklearn import metrics
    except ImportError as error:
        raise ImportError(
            "Detection metrics need scikit-learn; install it with: pip install 'dapcal[experiments]'"
        ) from error
    return metrics


def _ranked(inside: Tensor, outside: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Whether each score is of `outside`, and its rank among all; equal scores share a rank, infinite ones have one."""
    for name, scores in (("inside", inside), ("outside", outside)):
        if scores.ndim != 1 or len(scores) == 0:
            raise ValueError(f"Expected `{name}` as scores (N,), at least one, got shape {tuple(scores.shape)}")
        _check_numbers(scores, name)
    both = torch.cat([inside.detach().cpu().double(), outside.detach().cpu().double()])
    truth = np.arange(len(both)) >= len(inside)
    return truth, torch.unique(both, return_inverse=True)[1].numpy()


def _mean_over_ties(key: Tensor, values: Tensor) -> Tensor:
    """Values, averaged over entries with the same key: no result may hang on the order among those."""
    _, index, count = torch.unique(key, return_inverse=True, return_counts=True)
    return (torch.bincount(index, values) / count)[index]


def _mean_gap(diagram: Reliability) -> float:
    gaps = (diagram.accuracy - diagram.confidence).abs().nan_to_num()  # an empty bin has no gap
    return float((gaps * diagram.counts).sum() / diagram.counts.sum())


def _top_label(probs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    probs, y = _classes(probs, y)
    confidence, label = probs.max(-1)
    return confidence, (label == y).double()


def _classes(probs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if probs.ndim != 2 or y.shape != probs.shape[:1] or len(y) == 0:
        raise ValueError(
            f"Expected `probs` (N, K) and `y` (N,), at least one input, got {tuple(probs.shape)} and {tuple(y.shape)}"
        )
    if y.is_floating_point() or not bool(((y >= 0) & (y < probs.shape[1])).all()):
        raise ValueError(f"Expected `y` as class indices between 0 and {probs.shape[1] - 1}, got others; use y.long()")
    _check_numbers(probs, "probs")
    return probs.detach().cpu().double(), y.detach().cpu().long()


def _alike(**tensors: Tensor) -> list[Tensor]:
    """Tensors of one shape, in double precision on the CPU; (N,) against (N, 1) would broadcast to (N, N)."""
    if len({tensor.shape for tensor in tensors.values()}) > 1 or any(len(t.flatten()) == 0 for t in tensors.values()):
        shapes = ", ".join(f"`{name}` {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"Expected tensors of one shape, at least one entry, got {shapes}; reshape or expand them")
    for name, tensor in tensors.items():
        _check_numbers(tensor, name)
    return [tensor.detach().cpu().double() for tensor in tensors.values()]


def _check_numbers(values: Tensor, name: str) -> None:
    missing = int(values.isnan().sum())
    if missing:
        raise ValueError(f"Expected numbers in `{name}`, got NaN in {missing} of {values.numel()}; drop or repair them")


def _check_count(value: int, name: str, least: int) -> None:
    if value < least:
        raise ValueError(f"Expected `{name}` >= {least}, got {value}")
