"""Predictions at many inputs, before and after the adjustment, in batches: memory stays bounded."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.calibrate import Calibrated
from dapcal.diagnostics import total_weight
from dapcal.evidence import DOUBT, leading
from dapcal.predictive import Prediction
from dapcal.types import DapcalWarning

_BATCH = 256


class Answers(NamedTuple):
    """What a posterior says at N inputs, in double precision on the CPU."""

    mean: Tensor  # (N, K) class probabilities or expected targets
    variance: Tensor  # (N,) for classes, (N, K) for targets
    epistemic: Tensor  # shaped as `variance`
    log_prob: Tensor  # (N,) of the targets; NaN where there are none


class Predicted(NamedTuple):
    """Both answers, and how far the inputs are."""

    before: Answers
    after: Answers
    raw: Tensor  # (spaces, N)
    pre_distance: Tensor  # (N,)
    score: Tensor  # (N,)
    p_value: Tensor  # (N,)
    is_doubt: Tensor  # (N,) whether a flag is put down to the model's doubt, and not to a distance
    ess: Tensor  # (N,)
    total_weight: Tensor  # (N,)
    sums_to: Tensor  # (N,) the same after normalisation or completion, where the adjustment has them
    pareto_k: Tensor  # (N,)


def predict(calibrated: Calibrated, x: Tensor, y: Tensor | None = None) -> Predicted:
    """Predictions at inputs (N, ...), with the log probability of their targets where those are given."""
    before, after, numbers = [], [], []
    start = 0
    for prediction in calibrated.batches(x, _BATCH):
        targets = None if y is None else y[start : start + len(prediction)]
        before.append(_answers(prediction.base, targets))
        after.append(_answers(prediction, targets))
        numbers.append(_numbers(prediction))
        start += len(prediction)
    return Predicted(
        before=_joined(before),
        after=_joined(after),
        raw=_plain(calibrated.distance.raw(x)),  # bounds its memory itself
        **{name: torch.cat([part[name] for part in numbers]) for name in numbers[0]},
    )


@contextmanager
def quietly() -> Iterator[None]:
    """Without warnings of collapsed weights: they come once a batch, and the report counts them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DapcalWarning)
        yield


def _numbers(prediction: Prediction) -> dict[str, Tensor]:
    """What `Predicted` says of every input but the answers, (N,) each."""
    weights = prediction.diagnostics
    return {
        "pre_distance": _plain(prediction.pre_distance),
        "score": _plain(prediction.ood_score),
        "p_value": prediction.ood_p_value.cpu(),
        "is_doubt": torch.tensor([name == DOUBT for name in leading(prediction.evidence)]),
        "ess": _plain(weights.ess),
        "total_weight": _plain(weights.total_weight),
        "sums_to": _plain(total_weight(prediction.ensemble.log_weights)),
        "pareto_k": _plain(weights.pareto_k),
    }


def _answers(prediction: Prediction, y: Tensor | None) -> Answers:
    density = torch.full((len(prediction),), torch.nan) if y is None else prediction.log_prob(y)
    return Answers(*map(_plain, (prediction.mean, prediction.variance, prediction.epistemic, density)))


def _joined(parts: list[Answers]) -> Answers:
    return Answers(*(torch.cat(pieces) for pieces in zip(*parts, strict=True)))


def _plain(values: Tensor) -> Tensor:
    return values.detach().double().cpu()
