"""Samples of distances and scores, and the lines that matter in them: the radius, and p = 0.05."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.calibrate import Calibrated
from dapcal.distances import FittedSpace, Hausdorff, NearestNeighbor
from dapcal.projectors import project
from dapcal.report.predictions import Predicted
from dapcal.report.unseen import sample

MOST_SAMPLED = 2_000  # values in a sample
SUSPICIOUS = 0.05  # p-value up to which an input is flagged


class Histogram(NamedTuple):
    """Samples of one quantity, by where they come from, and a line that matters."""

    name: str
    samples: tuple[tuple[str, tuple[float, ...]], ...]  # training, held-out, then what lies outside
    line: float | None  # the radius, or the score at p = 0.05; None where there is none


def distance_histograms(
    calibrated: Calibrated, train: Tensor, named: list[tuple[str, Predicted]]
) -> tuple[Histogram, ...]:
    """Raw distances in every space, and the radius; training inputs where a metric has neighbours."""
    found = []
    for number, space in enumerate(calibrated.distance.spaces):
        own = _leave_one_out(space, train)
        samples = [] if own is None else [("training", own)]
        samples += [(name, predicted.raw[number]) for name, predicted in named]
        found.append(Histogram(space.name, _samples(samples), None if space.radius is None else space.radius.start))
    return tuple(found)


def score_histogram(calibrated: Calibrated, named: list[tuple[str, Predicted]]) -> Histogram:
    """OOD scores, and the one above which p <= 0.05."""
    return Histogram("OOD score", _samples([(name, found.score) for name, found in named]), _score_line(calibrated))


def _leave_one_out(space: FittedSpace, train: Tensor) -> Tensor | None:
    """Raw distances of a sample of the training inputs to the others; None where the metric has no neighbours."""
    if not isinstance(space.metric, NearestNeighbor | Hausdorff):
        return None
    k = space.metric.k if isinstance(space.metric, NearestNeighbor) else 1
    if k + 1 > len(train):
        return None
    rows = sample(torch.arange(len(train)), MOST_SAMPLED).to(train.device)
    return space.metric.index.query(project(space.projector, train[rows]), k + 1)[0][:, -1]


def _samples(named: list[tuple[str, Tensor]]) -> tuple[tuple[str, tuple[float, ...]], ...]:
    return tuple((name, tuple(sample(values.double().cpu(), MOST_SAMPLED).tolist())) for name, values in named)


def _score_line(calibrated: Calibrated) -> float | None:
    """The score above which p <= 0.05; None where too few held-out inputs can give so small a p-value."""
    held_out = calibrated.evidence.held_out
    allowed = int(SUSPICIOUS * (len(held_out) + 1) + 1e-9) - 1  # held-out scores that may be as high
    return None if allowed < 0 else float(held_out[len(held_out) - 1 - allowed])
