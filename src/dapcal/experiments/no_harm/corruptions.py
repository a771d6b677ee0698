"""Rows of a table with a mistake in them: outliers whose every other cell is ordinary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MOVED = 4.0  # standard deviations


def moved(x: Tensor, train: Tensor, generator: torch.Generator) -> Tensor:
    """Every row with one of its columns of numbers moved, by four of that column's standard deviations."""
    columns = _of_numbers(train)
    which = columns[torch.randint(len(columns), (len(x),), generator=generator)]
    sign = torch.where(torch.rand(len(x), generator=generator) < 0.5, -1.0, 1.0)
    changed = x.clone()
    changed[torch.arange(len(x)), which] += MOVED * sign * train.std(0)[which]
    return changed


def exchanged(x: Tensor, train: Tensor, generator: torch.Generator) -> Tensor:
    """Every row with the standardised values of two of its columns of numbers exchanged."""
    columns = _of_numbers(train)
    one, two = columns[torch.rand(len(x), len(columns), generator=generator).argsort(1)[:, :2]].T
    center, scale, row = train.mean(0), train.std(0), torch.arange(len(x))
    changed = x.clone()
    changed[row, one] = center[one] + scale[one] * (x[row, two] - center[two]) / scale[two]
    changed[row, two] = center[two] + scale[two] * (x[row, one] - center[one]) / scale[one]
    return changed


CORRUPTED: dict[str, Callable[[Tensor, Tensor, torch.Generator], Tensor]] = {
    "one column moved": moved, "two columns exchanged": exchanged,
}  # fmt: skip


def _of_numbers(train: Tensor) -> Tensor:
    """Columns with more than two values: moving one that says yes or no means nothing."""
    return torch.tensor([k for k in range(train.shape[1]) if len(train[:, k].unique()) > 2])
