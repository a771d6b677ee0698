"""Whether the parts of a file go together, by one prediction that leaves in the file what is large."""

from __future__ import annotations

import dataclasses
import operator
import warnings
from typing import Any

import torch

from dapcal.calibrate import Calibrated
from dapcal.distances import Distance, raw_in
from dapcal.distances.spaces import FittedSpace
from dapcal.in_file import InFile
from dapcal.posteriors.predictions import StackedPredictions

_ROWS = 1024  # that a prediction is tried with, of tensors that stay in the file


def predict_example(calibrated: Calibrated) -> None:
    """One prediction, which shows whether shapes, types and numbers go together."""
    calibrated = with_first_rows(calibrated)
    example = calibrated.example
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        if isinstance(calibrated.posterior, StackedPredictions):  # the user's function may cost, or want more inputs
            raw = [calibrated.distance.raw(example), raw_in(calibrated.evidence.further, example)]
            pieces = torch.cat([torch.zeros(1, 1), *(part.reshape(-1, 1).cpu() for part in raw)])
            score = calibrated.evidence.score(pieces.to(calibrated.evidence.center))
            calibrated.evidence.by_name(pieces.to(calibrated.evidence.center), calibrated.distance.spaces)
            found = [score, calibrated.evidence.p_value(score), torch.tensor(calibrated.factor)]
        else:
            prediction = calibrated(example)
            prediction.columns()
            found = [prediction.mean, prediction.variance, prediction.ood_p_value, prediction.distance]
    if not all(part.isfinite().all() for part in found):
        raise ValueError("its prediction for a training input is not finite")


def with_first_rows(calibrated: Calibrated) -> Calibrated:
    """The same with the first training points alone where they stay in the file: to try, as distances are others."""
    distance = Distance(tuple(map(_few_points, calibrated.distance.spaces)))
    further = tuple(map(_few_points, calibrated.evidence.further))
    evidence = dataclasses.replace(calibrated.evidence, further=further)
    return dataclasses.replace(calibrated, distance=distance, evidence=evidence)


def _few_points(space: FittedSpace) -> FittedSpace:
    neighbors = getattr(space.metric, "k", 1)  # of which there must be as many
    return dataclasses.replace(space, metric=_few(space.metric, max(_ROWS, neighbors)))


def _few(value: Any, rows: int) -> Any:
    """The same object where nothing in it stays in the file."""
    if isinstance(value, InFile):
        return value[:rows]
    if type(value) is tuple:
        few = tuple(_few(part, rows) for part in value)
        return value if all(map(operator.is_, few, value)) else few
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    names = [field.name for field in dataclasses.fields(value) if field.init]
    changed = {name: _few(getattr(value, name), rows) for name in names}
    changed = {name: part for name, part in changed.items() if part is not getattr(value, name)}
    try:
        return dataclasses.replace(value, **changed) if changed else value
    except ValueError:  # one whose parts must be as long as each other is tried as it is
        return value
