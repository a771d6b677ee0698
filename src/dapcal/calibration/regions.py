"""Regions to leave out of training: middle and outer thirds, along single columns and random directions.

A middle third asks for interpolation, an outer one for extrapolation. The middle third of a single column is the form
of the UCI gap benchmark, too.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["middle", "outer"]
FEWEST_VALUES = 10  # distinct ones of a column, so that its thirds are more than the order of equal rows


class Region(NamedTuple):
    """A third of the rows, and the others."""

    kind: Kind
    column: int | None  # None: a random direction
    missing: Tensor
    rest: Tensor


def thirds(x: Tensor, generator: torch.Generator, number: int = 12) -> list[Region]:
    """Regions of equal size, as many middle as outer ones and by turns along columns and directions; no two alike.

    A random one of the two outer thirds is left out. Columns come in random order; those with few distinct values
    (`FEWEST_VALUES`) are passed over, and without others all regions lie along directions. Of a single column there are
    three regions in all.

    Args:
        x: inputs, (N, ...).
        generator: of columns, directions and sides.
        number: of regions, at most.
    """
    flat = x.flatten(1).double().cpu()
    if len(flat) < 3:
        raise ValueError(f"Expected at least 3 rows to leave a third of them out, got {len(flat)}")
    columns = [c for c in range(flat.shape[1]) if len(flat[:, c].unique()) >= FEWEST_VALUES]
    found: dict[tuple[int, ...], Region] = {}
    order: list[int] = []
    for turn in range(4 * number):  # some come out alike where there are few columns
        kind: Kind = "outer" if turn % 4 in (1, 2) else "middle"
        column = None
        if columns and turn % 2 == 0:
            order = order or [columns[place] for place in torch.randperm(len(columns), generator=generator)]
            column = order.pop()
        if column is None:
            along = flat @ torch.randn(flat.shape[1], generator=generator, dtype=torch.float64)
        else:
            along = flat[:, column]
        missing, rest = third(along, kind, bool(torch.rand((), generator=generator) < 0.5))
        found.setdefault(tuple(missing.sort().values.tolist()), Region(kind, column, missing, rest))
        if len(found) == number:
            break
    return list(found.values())


def third(along: Tensor, kind: Kind, upper: bool = False) -> tuple[Tensor, Tensor]:
    """Rows of a third by their place (N,) along a line, and the others: the middle one, or the lower or upper one.

    >>> third(torch.tensor([5.0, 1.0, 3.0, 2.0, 4.0, 6.0]), "middle")
    (tensor([2, 4]), tensor([1, 3, 0, 5]))
    """
    order = along.argsort(stable=True)
    size = len(order) // 3
    first = (len(order) - size) // 2 if kind == "middle" else (len(order) - size) * upper
    return order[first : first + size], torch.cat([order[:first], order[first + size :]])
