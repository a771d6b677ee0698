"""Arrays `x` and `y` of npz files as a network's inputs and targets.

Rules: floating-point inputs take the network's precision; int32 and int64 are token ids and stay whole numbers; bytes
(uint8, such as raw pixels), booleans and other types are refused, as only who trained the network knows how they were
scaled. Targets: whole numbers are classes, fractions are for regression.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dapcal import npz
from dapcal.data import Labelled, check_inputs
from dapcal.npz import Array


def labelled(path: str | Path, dtype: torch.dtype) -> Labelled:
    """Inputs and targets of a file; floating-point inputs in `dtype`."""
    x, y = array(path, "x"), array(path, "y")
    if y.shape[0] != x.shape[0]:
        raise ValueError(f"{path}: Expected as many targets as inputs, got {x.shape[0]} in `x` and {y.shape[0]} in `y`")
    if y.dtype.kind not in "biuf":
        raise ValueError(f"{path}: Expected `y` as numbers, got {y.dtype}; classes are whole numbers from 0")
    inputs, targets = as_inputs(x.read(), dtype, str(path)), y.read()
    if targets.dtype.kind != "f":
        return Labelled(inputs, torch.from_numpy(targets.astype(np.int64)))
    if not np.isfinite(targets).all():
        raise ValueError(f"{path}: Expected finite targets in `y`, got NaN or inf; drop those rows")
    return Labelled(inputs, torch.from_numpy(targets.astype(np.float64)).to(dtype))


def unlabelled(path: str | Path, dtype: torch.dtype) -> Tensor:
    """Inputs alone."""
    return as_inputs(array(path, "x").read(), dtype, str(path))


def as_inputs(values: np.ndarray, dtype: torch.dtype, source: str, first: int = 0) -> Tensor:
    """Inputs (N, ...) as a network takes them; `first` is the number of the first row, counted from 0, for errors."""
    if values.dtype.kind == "f":
        x = torch.from_numpy(values if values.dtype.itemsize <= 8 else values.astype(np.float64)).to(dtype)
    elif values.dtype in (np.int32, np.int64):
        x = torch.from_numpy(values.astype(np.int64))
    else:
        pixels = "save x.astype('float32') / 255 if the model was trained so"
        advice = pixels if values.dtype == np.uint8 else "convert it as in training"
        raise ValueError(
            f"{source}: Expected `x` as floating-point inputs, or int64 token ids, got {values.dtype}; {advice}"
        )
    finite = x.isfinite().flatten(1).all(1) if x.ndim > 1 else x.isfinite()
    if not finite.all():
        row = first + int((~finite).nonzero()[0])
        raise ValueError(
            f"{source}: Expected finite inputs in `x`, got NaN or inf in row {row}; drop or impute such rows"
        )
    try:
        return check_inputs(x, "x")
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def array(path: str | Path, name: str) -> Array:
    """An array of at least one row, not yet read."""
    found = npz.array(path, name)
    if not found.shape or 0 in found.shape:
        raise ValueError(f"{path}: Expected at least one row in `{name}`, got shape {found.shape}")
    return found
