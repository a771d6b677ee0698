"""What a model's file keeps beside the calibrated posterior, checked as it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dapcal.calibrate import Calibrated
from dapcal.data import Labelled


def checked_pairs(
    attachments: Mapping[str, Tensor],
    name: str,
    shape: tuple[int, ...],
    classes: int | None,
    device: str | torch.device,
) -> Labelled:
    """Inputs of a shape and their targets: labels of so many classes, numbers where these are 0, any where None."""
    x, y = attachments[f"{name}.x"], attachments[f"{name}.y"]
    if x.shape[1:] != shape or len(x) != len(y) or not len(x):
        raise ValueError(f"`{name}` holds {tuple(x.shape)} inputs of shape {shape} and {tuple(y.shape)} targets")
    if classes and (y.is_floating_point() or y.ndim != 1 or int(y.min()) < 0 or int(y.max()) >= classes):
        raise ValueError(f"`{name}` holds targets that are not labels of {classes} classes")
    if classes == 0 and not y.is_floating_point():
        raise ValueError(f"`{name}` holds targets that are not numbers")
    return Labelled(x.to(device), y.to(device))


def checked_texts(values: Any) -> tuple[str, ...]:
    """A list of texts."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError("a list of texts holds something else")
    return tuple(values)


def check_halves(calibrated: Calibrated, rows: int) -> None:
    """The rows that chose and those that judge are among the held-out rows."""
    for half in (calibrated.chooses, calibrated.judges):
        if half is not None and len(half) and not 0 <= int(half.min()) <= int(half.max()) < rows:
            raise ValueError(f"it names held-out rows beyond the {rows} that it holds")
