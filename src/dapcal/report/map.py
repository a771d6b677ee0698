"""Two-dimensional inputs: confidence or epistemic deviation over the plane, for several values of φ."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.calibrate import Calibrated
from dapcal.likelihoods import ClassLikelihood
from dapcal.models.subject import Axis, Subject
from dapcal.report.unseen import sample
from dapcal.types import Adjusted

_CELLS = 96  # along each side
_STEPS = 15
_DECADES = 2.0  # of the factor g(φ) on both sides of the chosen one
_MARGIN = 0.75  # of the training inputs' range, on every side
_MOST_POINTS = 300
_BATCH = 1024


class MapFrame(NamedTuple):
    """The plane at one φ; None is the posterior as it was."""

    phi: float | None
    times: float  # the chosen factor
    values: Tensor  # (cells, cells), the first row at the largest second input


class Map(NamedTuple):
    """The plane at several φ, in what people see of the inputs."""

    axes: tuple[Axis, Axis]
    low: tuple[float, float]  # of the two inputs
    high: tuple[float, float]
    frames: tuple[MapFrame, ...]  # first the posterior as it was, then by φ
    chosen: int  # which of them is the calibrated one
    points: Tensor  # (M, 2) training inputs, drawn at random
    is_second: Tensor  # (M,) which of them are of the second of two classes
    range: tuple[float, float]  # of the values that colours stand for


def plane(subject: Subject) -> Map | None:
    """The map, where inputs are two numbers."""
    train = subject.train.x
    if train.ndim != 2 or train.shape[1] != 2 or not train.is_floating_point():
        return None
    calibrated = subject.calibrated
    margin = _MARGIN * (train.amax(0) - train.amin(0))
    low, high = train.amin(0) - margin, train.amax(0) + margin
    across, down = (
        torch.linspace(float(a), float(b), _CELLS, dtype=train.dtype) for a, b in zip(low, high, strict=True)
    )
    grid = torch.stack([across.repeat(_CELLS), down.flip(0).repeat_interleave(_CELLS)], 1).to(train.device)
    scale = 1.0 if subject.is_classification else abs(subject.unit[1])
    times = torch.logspace(-_DECADES, _DECADES, _STEPS, dtype=torch.float64)
    phis = calibrated.scale.inverse(times * calibrated.factor)
    phis[_STEPS // 2] = calibrated.phi
    times, phis = times[phis.isfinite()], phis[phis.isfinite()]  # g may stay under an upper end
    values = scale * _values(calibrated, grid, torch.cat([torch.zeros(1), times]) * calibrated.factor)
    frames = zip([None, *phis.tolist()], [0.0, *times.tolist()], values.reshape(-1, _CELLS, _CELLS), strict=True)
    rows = sample(torch.arange(len(train)), _MOST_POINTS)
    points = train[rows.to(train.device)].double().cpu()
    names = subject.features or ("first input", "second input")
    axes = subject.axes or (Axis(names[0]), Axis(names[1]))
    return Map(
        axes=axes,
        low=_shown(axes, low),
        high=_shown(axes, high),
        frames=tuple(MapFrame(*frame) for frame in frames),
        chosen=1 + _STEPS // 2,
        points=torch.stack([axis.center + axis.scale * points[:, i] for i, axis in enumerate(axes)], 1),
        is_second=(subject.train.y[rows].reshape(len(rows), -1)[:, 0] == 1).cpu() & (len(subject.classes) == 2),
        range=_range(values, len(subject.classes)),
    )


def _values(calibrated: Calibrated, grid: Tensor, factors: Tensor) -> Tensor:
    """Confidence, or epistemic deviation, at every factor and place, (M, N)."""
    parts = []
    for batch in grid.split(_BATCH):
        adjusted, d0 = calibrated.adjust(calibrated.posterior, batch), calibrated.distance(batch)
        parts.append(torch.stack([_value(calibrated, adjusted, factor * d0) for factor in factors.tolist()]))
    return torch.cat(parts, 1).double().cpu()


def _value(calibrated: Calibrated, adjusted: Adjusted, distance: Tensor) -> Tensor:
    likelihood, ensemble = calibrated.posterior.likelihood, adjusted(distance)
    if isinstance(likelihood, ClassLikelihood):
        return likelihood.mean(ensemble).max(-1).values
    epistemic = likelihood.split(ensemble, adjusted(torch.zeros_like(distance))).epistemic
    return epistemic.mean(-1).sqrt()


def _shown(axes: tuple[Axis, Axis], place: Tensor) -> tuple[float, float]:
    first, second = (axis.center + axis.scale * float(value) for axis, value in zip(axes, place, strict=True))
    return first, second


def _range(values: Tensor, classes: int) -> tuple[float, float]:
    """From 1/K to 1; in regression to what 98 % of the calibrated plane do not exceed, so that its shape is seen."""
    if classes:
        return 1 / classes, 1.0
    return 0.0, float(values[1 + _STEPS // 2].quantile(0.98))
