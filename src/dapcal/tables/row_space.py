"""The space in which a table's rows are compared with those that are most alike."""

from __future__ import annotations

from functools import partial

from dapcal.distances import Coreset, Space, Standardised, nearest


def row_space(points: int | None = None, seed: int = 0) -> Space:
    """Distance to the nearest row, whose columns all vary alike.

    Args:
        points: training rows that are kept; by default all.
        seed: of what is kept.
    """
    kept = None if points is None else Coreset(points, seed=seed)
    return Space(Standardised(), partial(nearest, index=kept), radius=None, name="standardised inputs")
