"""Small models of tables as they are fitted today: boosted trees beside networks, TabM, noise by the row, intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dapcal import models
from dapcal.likelihoods import Gaussian, VaryingNoise
from dapcal.models.table import TableModel
from dapcal.models.table_fitting import fit
from dapcal.recipes import Recipe

ROWS = 520  # so that enough of them choose for trees to be weighed
SMALL = Recipe(hidden=(4,), epochs=2, members=2, fast=True, row_noise=False)
TABM = Recipe("tabm", hidden=(4,), epochs=2, members=2, fast=True, bins=3, embedding=2)


def rows(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """A step, and noise that grows with it."""
    draws = np.random.default_rng(seed)
    area, city = draws.normal(80, 20, count), draws.choice(["Rome", "Oslo", "Bonn"], count)
    price = 200 * (area > 85) + 40 * (city == "Rome") + draws.normal(0, 1, count) * np.where(area > 85, 30, 3)
    return {"area": area, "city": city, "target": np.maximum(price, 0)}


def of_numbers(recipe: Recipe = SMALL) -> TableModel:
    """Regression, with residuals for intervals and a bound."""
    return fit(pa.table(rows(ROWS)), "target", recipe=recipe)


def of_classes() -> TableModel:
    """Three classes, of which each has its trees."""
    found = rows(ROWS)
    names = np.digitize(found["target"], [50, 200]).astype(str)
    return fit(pa.table({**found, "target": names}), "target", recipe=SMALL)


def with_row_noise() -> TableModel:
    """Regression with noise by the row, as if rows had asked for it."""
    model = of_numbers()
    known = model.calibrated.posterior.likelihood
    assert isinstance(known, Gaussian)
    noise = VaryingNoise(float(known.noise), (-1.0, 0.0, 1.0), (-0.1, 0.0, 0.3), 0.2, (0.1, 0.01, 1.0), known.conformal)
    return replace(model, calibrated=model.calibrated.with_likelihood(noise))


KINDS: dict[str, Callable[[], TableModel]] = {
    "boosted numbers": of_numbers,
    "boosted classes": of_classes,
    "TabM": lambda: of_numbers(TABM),
    "noise by the row": with_row_noise,
}


def predicted(path: Path) -> Tensor:
    """What a file predicts for rows that go down many branches."""
    model = models.load(path)
    table = model.predict(pa.table({name: rows(60, 1)[name] for name in ("area", "city")})).table
    model.fields()
    named = [name for name in table.column_names if pa.types.is_floating(table.schema.field(name).type)]
    return torch.tensor([value for name in named for value in table[name].to_pylist()], dtype=torch.float64)
