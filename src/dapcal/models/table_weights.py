"""How much the rows of a table count in training: a column says so, or their class."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dapcal.amounts import amount
from dapcal.tables.columns import find, nearest
from dapcal.tables.targets import Classes, Numbers
from dapcal.tables.values import numbers

BALANCED = "balanced"


def row_weights(
    rows: pa.Table, y: Tensor, goal: Classes | Numbers, column: str | None, classes: str | Mapping[str, float] | None
) -> tuple[Tensor | None, list[str]]:
    """Weights (N,) with a mean of 1, None where nothing was asked for; and what there is to say of them.

    Args:
        rows: that have a target.
        y: their encoded targets.
        goal: classes or numbers.
        column: of numbers >= 0.
        classes: by their name, or "balanced".
    """
    found, notes = torch.ones(len(rows), dtype=torch.float64), []
    if column is not None:
        found = found * _of_column(rows, column)
        notes.append(f"rows count in training as `{column}` says; it is not an input")
    if classes is not None:
        found = found * _of_classes(y, goal, classes)
        notes.append("classes count in training as was asked, and probabilities are those of a table with such shares")
    return (found / found.mean() if notes else None), notes


def _of_column(rows: pa.Table, name: str) -> Tensor:
    values = numbers(rows[find(rows, name)], name)
    wrong = np.isnan(values) | (values < 0)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"Expected numbers >= 0 in `{name}`, the weights, got {amount(values[row])} in row {row + 1}; fill it in"
        )
    if not values.sum() > 0:
        raise ValueError(f"Expected a weight above 0 in `{name}`, got none; choose another column")
    return torch.from_numpy(values.copy())


def _of_classes(y: Tensor, goal: Classes | Numbers, given: str | Mapping[str, float]) -> Tensor:
    if not isinstance(goal, Classes):
        raise ValueError("The target holds numbers, which have no classes to weigh; leave the class weights out")
    count = y.bincount(minlength=len(goal.labels)).double()
    if isinstance(given, str):
        if given != BALANCED:
            raise ValueError(f"Expected class weights as {BALANCED}, or as class=weight, got {given!r}")
        return (1 / count)[y]
    each = torch.ones(len(goal.labels), dtype=torch.float64)
    for name, value in given.items():
        if name not in goal.labels:
            near = nearest(name, goal.labels)
            raise ValueError(
                f"The target has no class {name!r}"
                + (f"; did you mean {near!r}?" if near else f"; it has {', '.join(goal.labels[:10])}")
            )
        if not 0 < value < float("inf"):
            raise ValueError(f"Expected a weight above 0 for class {name!r}, got {amount(value)}")
        each[goal.labels.index(name)] = value
    return each[y]
