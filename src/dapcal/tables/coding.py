"""Categories of many levels by what the target was: a code for a level, learnt from other rows than the one it is for.

    code of a level = Σ z/(n + STIFFNESS) over its n training rows, z the standardised target, of classes each in turn

Levels of few rows are drawn to 0, the mean. A row whose own target is in its code would give it away, so training rows
have codes from the folds that they are not in; held-out and new rows have those of all training rows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from dapcal.tables.columns import Category
from dapcal.tables.encoder import Column, Encoder
from dapcal.tables.values import texts

FOLDS = 5
STIFFNESS = 10.0  # rows of the mean target that a level has beside its own
MOST_CLASSES = 10  # that codes speak of, the most frequent ones


def with_codes(
    encoder: Encoder, rows: pa.Table, y: Tensor, seed: int, places: np.ndarray | None = None
) -> tuple[Encoder, Tensor]:
    """The encoder with codes in columns of more levels than can be told apart, and the rows encoded, (N, P).

    Args:
        encoder: fitted to the rows.
        rows: training rows, and held-out ones.
        y: their targets, encoded: classes (N,), or numbers (N, 1).
        seed: of the folds.
        places: of the training rows; by default all.
    """
    many = [column for column in encoder.columns if isinstance(column, Category) and column.rare]
    if not many:
        return encoder, encoder(rows).x
    places = np.arange(len(rows)) if places is None else places
    z = _standardised(y[torch.from_numpy(places)])
    level = {column.name: _levels(column, rows)[places] for column in many}
    coded = {column.name: replace(column, codes=_codes(level[column.name], z, column)) for column in many}
    told = [f"column `{name}` also counts by what the target was in other rows with the same level" for name in coded]
    columns: tuple[Column, ...] = tuple(coded.get(column.name, column) for column in encoder.columns)
    found = replace(encoder, columns=columns, notes=(*encoder.notes, *told))
    x, start = found(rows).x.numpy(), 0
    fold = np.random.default_rng(seed).permutation(len(z)) % FOLDS
    for column in found.columns:
        if isinstance(column, Category) and column.codes:
            part, own = x[:, start + column.indicators : start + column.width], level[column.name]
            for number in range(FOLDS):
                others, inside = fold != number, (fold == number) & (own >= 0)
                part[places[inside]] = np.array(_codes(own[others], z[others], column), np.float32)[own[inside]]
        start += column.width
    return found, torch.from_numpy(x)


def _standardised(y: Tensor) -> np.ndarray:
    """Targets, or 0/1 of classes (of two the second), with mean 0 and deviation 1, (N, T)."""
    if y.is_floating_point():
        values = y.double().reshape(len(y), -1).numpy()
    else:
        frequent = y.bincount().argsort(descending=True)[:MOST_CLASSES]
        asked = torch.tensor([1]) if int(y.max()) == 1 else frequent.sort().values
        values = (y[:, None] == asked).double().numpy()
    return (values - values.mean(0)) / np.maximum(values.std(0), 1e-12)


def _levels(column: Category, rows: pa.Table) -> np.ndarray:
    """The level of every row, −1 where it is missing, (N,)."""
    known = pa.array((*column.levels, *column.rare), pa.string())
    found = pc.index_in(texts(rows[column.name], column.name), known)
    return pc.fill_null(found, -1).to_numpy().astype(np.int64)


def _codes(level: np.ndarray, z: np.ndarray, column: Category) -> tuple[tuple[float, ...], ...]:
    count = len(column.levels) + len(column.rare)
    sums = np.zeros((count, z.shape[1]))
    np.add.at(sums, level[level >= 0], z[level >= 0])
    rows = np.bincount(level[level >= 0], minlength=count)[:, None]
    return tuple(map(tuple, (sums / (rows + STIFFNESS)).tolist()))
