"""What a model looks at, in the report: shuffled columns and partial dependence, on a function that is known."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from dapcal.models.table_fitting import fit
from dapcal.recipes import Recipe
from dapcal.report.examples import gather
from dapcal.report.page import page
from dapcal.report.questions import column_effects


@pytest.fixture(scope="module")
def examples():
    random = np.random.default_rng(0)
    area, noise = random.normal(100, 20, 400), random.normal(0, 1, 400)
    city = random.choice(["Rome", "Oslo"], 400)
    table = pa.table({"noise": noise, "area": area, "city": city, "price": 5 * area + 60 * (city == "Rome")})
    recipe = Recipe(fast=True, members=2, hidden=(16,), epochs=60, validation=0.4)
    return gather(fit(table, "price", recipe=recipe).subject("house.dap"))


def test_columns_are_ordered_by_what_they_cost(examples):
    found = column_effects.measure(examples)
    assert [one.column for one in found.important] == ["area", "city", "noise"]
    losses = {one.column: one.loss for one in found.important}
    # shuffling a column of variance v adds 2 v to the squared error of a function that is known exactly
    assert losses["area"] == pytest.approx(np.sqrt(2) * 5 * 20, rel=0.2)
    assert abs(losses["noise"]) < 0.1 * losses["area"]


def test_predictions_follow_the_column(examples):
    effect = next(one for one in column_effects.measure(examples).effects if one.column == "area")
    slope = np.polyfit(effect.values, effect.mean, 1)[0]
    assert slope == pytest.approx(5, rel=0.15)
    assert 50 < min(effect.values) < max(effect.values) < 150
    assert all(low <= mean <= high for low, mean, high in zip(effect.low, effect.mean, effect.high, strict=True))


def test_the_page_shows_them(examples):
    shown = page(examples)
    assert "What does it look at?" in shown
    assert "price against area" in shown
