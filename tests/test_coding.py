"""Categories of many levels by what the target was: the formula, no row sees its own target, files, missing cells."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from dapcal.models.table_fitting import fit
from dapcal.recipes import Recipe
from dapcal.tables.coding import STIFFNESS, with_codes
from dapcal.tables.columns import Category
from dapcal.tables.descriptions import encoder_from_json
from dapcal.tables.encoder import fit_encoder
from dapcal.tables.targets import fit_target

QUICK = Recipe(hidden=(16,), epochs=20, members=2, learning_rate=0.02, batch_size=64, fast=True, refit=False)


def streets(n: int = 1200, levels: int = 120, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    level = rng.integers(0, levels, n)
    effect = np.random.default_rng(99).normal(size=levels)
    return pa.table(
        {"street": [f"s{k}" for k in level], "x": rng.normal(size=n), "y": effect[level] + 0.1 * rng.normal(size=n)}
    )


def encoded(table: pa.Table, target: str = "y", seed: int = 0):
    goal = fit_target(table[target])
    y = goal.encode(table[target])
    return *with_codes(fit_encoder(table, target), table, y, seed), y


def test_codes_are_shrunken_means_of_the_standardised_target():
    table = streets()
    encoder, _, y = encoded(table)
    column = encoder.columns[0]
    level = (*column.levels, *column.rare)[70]
    own = torch.tensor([street == level for street in table["street"].to_pylist()])
    z = (y[:, 0] - y.mean()) / y.std(correction=0)
    assert column.codes[70] == pytest.approx((float(z[own].sum() / (own.sum() + STIFFNESS)),), rel=1e-5)
    assert any("also counts by what the target was" in note for note in encoder.notes)
    new = encoder(pa.table({"street": [level, None], "x": [0.0, 0.0]})).x
    assert new[:, column.width - 1].tolist() == pytest.approx([column.codes[70][0], 0.0], rel=1e-5)


def test_no_training_row_sees_its_own_target():
    """Rows of two levels exchange targets: their own codes stay, those of others with the level change."""
    table = streets()
    street = table["street"].to_pylist()
    y = torch.tensor(table["y"].to_pylist())[:, None]
    other = next(row for row in range(1200) if street[row] != street[0] and abs(float(y[row] - y[0])) > 1)
    exchanged = y.clone()
    exchanged[[0, other]] = y[[other, 0]]
    place = fit_encoder(table, "y").columns[0].width
    first, second = (with_codes(fit_encoder(table, "y"), table, given, 0)[1][:, place] for given in (y, exchanged))
    assert float(first[0]) == pytest.approx(float(second[0]), abs=1e-6)
    twins = [row for row in range(1, 1200) if street[row] == street[0]]
    assert any(abs(float(second[row] - first[row])) > 1e-3 for row in twins)


def test_few_levels_have_no_codes_and_classes_have_one_each():
    few = streets(levels=20)
    encoder, x, _ = encoded(few)
    assert all(not column.codes for column in encoder.columns if isinstance(column, Category))
    assert torch.equal(x, fit_encoder(few, "y")(few).x)
    table = streets()
    for labels, width in (("ab", 1), ("abc", 3)):
        named = table.set_column(2, "y", pa.array([labels[k % len(labels)] for k in range(1200)]))
        assert len(encoded(named)[0].columns[0].codes[0]) == width


def test_levels_beyond_the_most_frequent_are_told_apart():
    table, new = streets(3000), streets(600, seed=1)
    model = fit(table, "y", recipe=QUICK)
    y = np.array(new["y"].to_pylist())
    error = np.sqrt(np.mean((np.array(model.predict(new).table["prediction"].to_pylist()) - y) ** 2))
    assert error < 0.55 * y.std()


def test_codes_are_stored_and_damage_is_refused():
    encoder, _, _ = encoded(streets())
    stored = encoder.as_json()
    assert encoder_from_json(stored) == encoder
    for damaged in ([[1.0]], [["a"]] * 120, [[float("nan")]] * 120, [[1.0]] * 119 + [[1.0, 2.0]]):
        column = {**stored["columns"][0], "codes": damaged}
        with pytest.raises(ValueError, match="code for every level"):
            encoder_from_json({**stored, "columns": [column, *stored["columns"][1:]]})


def test_missing_cells_of_an_open_column_are_named_and_rare_levels_are_not_missing():
    tickets = [f"t{k}" for k in range(100)] + ["group"] * 100
    table = pa.table({"ticket": tickets, "x": list(range(0, 400, 2)), "y": [k % 7 + 0.5 for k in range(200)]})
    encoder, _, _ = encoded(table)
    assert encoder.columns[0].open
    new = encoder(pa.table({"ticket": ["t3", "new", None, "group"], "x": [1.0, 2.0, 3.0, 4.0]})).x
    assert encoder.missing(new) == [[], [], ["ticket"], []]
