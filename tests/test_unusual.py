"""Rows that are not like the others: blanks, wrong units, unseen categories, and columns that drift as a whole."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from scipy.stats import ks_2samp

from dapcal.distances.column_checks import FINE
from dapcal.models.drift import Sample, drifts
from dapcal.models.table_fitting import fit
from dapcal.models.unusual import _WORDS
from dapcal.recipes import Recipe
from dapcal.tables import Category, Encoder, Number, fit_encoder
from table_cases import run


def houses(n: int, seed: int = 0) -> pa.Table:
    random = np.random.default_rng(seed)
    area, rooms = random.normal(80, 15, n).round(), random.integers(1, 6, n)
    noise = {f"noise {place}": random.normal(0, 1, n).round(2) for place in range(20)}
    city = random.choice(["Rome", "Oslo", "Bern"], n)
    return pa.table({"area": area, "rooms": rooms, "city": city, **noise, "price": 3 * area + 10 * rooms})


@pytest.fixture(scope="module")
def model():
    recipe = Recipe(fast=True, members=2, hidden=(8,), epochs=4, validation=0.4)
    return fit(houses(500), "price", recipe=recipe)


def changed(table: pa.Table, name: str, values: list) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, pa.array(values))


def test_a_row_of_blanks_is_flagged_and_every_blank_is_named(model):
    """Before: p = 0.97, as every cell was filled in with the most ordinary value."""
    table = houses(1, seed=1).drop_columns(["price"])
    blank = pa.table({name: pa.nulls(1, table[name].type) for name in table.column_names})
    found = model.predict(blank).table.to_pylist()[0]
    assert found["ood"]
    assert found["ood_p_value"] == pytest.approx(1 / (1 + len(model.calibrated.evidence.held_out)))
    assert found["missing"] == ", ".join(table.column_names)
    assert found["unusual"].count(": missing") == 3
    assert model.predict(table).table["missing"].to_pylist() == [""]


def test_a_module_says_the_same_of_columns(model):
    x = model.encoder(changed(houses(20, seed=3), "area", [800.0] * 10 + [80.0] * 10)).x
    own, deployed = model.calibrated(x), model.calibrated.module()(x)
    torch.testing.assert_close(deployed.ood_score, own.ood_score)
    assert torch.equal(deployed.ood_p_value, own.ood_p_value)
    assert len(own.ood_p_value.unique()) > 2


def test_one_wrong_unit_among_twenty_three_columns_is_flagged_and_named(model):
    table = houses(40, seed=2)
    wrong = changed(table, "area", [10.764 * value for value in table["area"].to_pylist()])
    found = model.predict(wrong).table
    assert np.mean(found["ood"].to_pylist()) > 0.95
    assert all(text.startswith("area: ") for text in found["unusual"].to_pylist() if text)
    assert set(found["reason"].to_pylist()) <= {
        "",
        "unusual columns",
        "far from the training data (standardised inputs)",
        "far from the training data (inputs)",
        "far from the training data (features)",
        "uncertain (the draws disagree)",
    }


def test_every_flag_says_what_is_behind_it(model):
    """Before: half of the flags by distance or doubt named no column."""
    table = houses(1500, seed=7)
    predicted = model.predict(table)
    found, columns = predicted.table.to_pylist(), model.columns(predicted.encoded.x)
    flagged = [place for place, row in enumerate(found) if row["ood"]]
    assert len(flagged) > 10
    for place in flagged:
        far = "far" in found[place]["reason"] or found[place]["distance"] > 0 or "columns" in found[place]["reason"]
        assert found[place]["unusual"]
        assert bool(columns["unusual"][place]) or not far or "uncertain" in found[place]["reason"]
        if not columns["unusual"][place]:
            assert found[place]["unusual"] == "no column is far: the draws disagree"
    assert any("from the nearest rows" in found[place]["unusual"] for place in flagged)
    assert not any(row["unusual"] for row in found if not row["ood"])


def test_decimals_are_not_said_to_be_more_than_all_training_rows_had():
    """Some may have had them: Titanic's ages hold 28.5, and 32.5 was told to have more decimals than in training."""
    assert _WORDS[FINE] == "more decimals than most training rows"


def test_ordinary_rows_are_flagged_as_often_as_they_should_be(model):
    flagged = np.array(model.predict(houses(2000, seed=3)).table["ood"].to_pylist()).mean()
    judges = len(model.calibrated.evidence.held_out)
    assert abs(flagged - 0.05) < 3 * np.sqrt(0.05 * 0.95 * (1 / 2000 + 1 / judges))


def test_an_unseen_category_is_named_with_the_spelling_that_was_meant(model, tmp_path: Path):
    table = changed(houses(30, seed=4), "city", ["Roma"] * 30)
    found = model.predict(table)
    assert np.mean(found.table["ood"].to_pylist()) > 0.9
    assert found.encoded.unknown == {"city": {"Roma": 30}}
    (note,) = model.notes_on([{**table.to_pylist()[0]}])[:1]
    assert "'Roma'; did you mean 'Rome'?" in note


def test_the_columns_survive_saving(model, tmp_path: Path):
    from dapcal.models import load

    model.save(tmp_path / "m.dap")
    table = changed(houses(5, seed=5), "area", [5000.0] * 5)
    assert load(tmp_path / "m.dap").predict(table).table.equals(model.predict(table).table)


def test_the_commands_name_them(model, tmp_path: Path):
    model.save(tmp_path / "m.dap")
    table = houses(60, seed=6)
    wrong = changed(table, "area", [0.1 * value for value in table["area"].to_pylist()]).to_pylist()
    wrong[0]["city"] = None
    with (tmp_path / "new.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, wrong[0])
        writer.writeheader()
        writer.writerows(wrong)
    said = run("predict", tmp_path / "m.dap", tmp_path / "new.csv", "-o", tmp_path / "out.csv").stdout
    assert "Columns behind flags: `area` (" in said
    assert "Column `area` differs from training as a whole: median 8" in said
    told = run("explain", tmp_path / "m.dap", tmp_path / "new.csv").stdout
    assert "Missing: `city`" in told
    assert "Most unusual by itself: `" in told
    told = json.loads(run("explain", tmp_path / "m.dap", tmp_path / "new.csv", "--json").stdout)
    assert told["missing"] == ["city"]
    assert "area" in told["unusual"]
    page = tmp_path / "report.html"
    assert run("report", tmp_path / "m.dap", "--data", tmp_path / "new.csv", "-o", page).exit_code == 0
    shown = page.read_text(encoding="utf-8")
    assert "Which columns are not what they were?" in shown
    assert "Unusual by itself: area (" in shown


# Drift


def test_ordinary_files_seldom_have_a_column_that_differs():
    table = houses(400)
    encoder = fit_encoder(table, "price")
    train = encoder(table).x
    found = [bool(drifts(encoder, train, encoder(houses(100, seed=seed)).x)) for seed in range(10, 40)]
    assert sum(found) <= 4  # 1.5 are expected at most


def test_where_medians_are_the_same_the_difference_is_told_where_it_is_largest():
    table = pa.table({"baths": [1.0] * 30 + [2.0] * 300 + [3.0] * 70, "price": np.arange(400.0)})
    new = pa.table({"baths": [1.0] * 45 + [2.0] * 52 + [3.0] * 3, "price": np.zeros(100)})
    encoder = fit_encoder(table, "price")
    (drift,) = drifts(encoder, encoder(table).x, encoder(new).x)
    assert drift.what == "at most 1 are 8 % in training, 45 % here"


def test_columns_that_moved_are_found_and_told():
    table, new = houses(400), houses(100, seed=1)
    encoder = fit_encoder(table, "price")
    new = changed(new, "area", [2 * value for value in new["area"].to_pylist()])
    new = changed(new, "city", ["Rome"] * 70 + ["Oslo"] * 30)
    new = changed(new, "rooms", [None] * 30 + new["rooms"].to_pylist()[30:])
    found = {one.column: one for one in drifts(encoder, encoder(table).x, encoder(new).x)}
    assert set(found) == {"area", "city", "rooms"}
    assert found["rooms"].what == "missing in 0 % of the rows in training, 30 % here"
    assert found["city"].what.startswith("'Rome' 3")
    assert drifts(encoder, encoder(table).x, encoder(new).x[:10]) == []  # too few to tell


@pytest.mark.parametrize("most", [0.5, 0.05, 0.0])
@pytest.mark.parametrize("sizes", [(3, 25), (90, 20), (400, 250), (9000, 700)])
def test_numbers_are_compared_as_scipy_does(sizes, most):
    """p-values that reject nothing are not worked out, which decides nothing."""
    random = np.random.default_rng(0)
    shifts = {f"c{place}": most * place / 10 for place in range(12)}
    train, new = (
        pa.table({name: random.normal(by * shift, 1, n).round(1) for name, shift in shifts.items()})
        for n, by in zip(sizes, (0, 1), strict=True)
    )
    encoder = Encoder(tuple(Number(name, 0.0, 1.0, missing=False) for name in shifts), "y")
    before, after = encoder(train).x, encoder(new).x
    kept = before[torch.randperm(len(before), generator=torch.Generator().manual_seed(0))[:5000]]
    tests = [ks_2samp(*(x[:, 2 * p].double().numpy() for x in (kept, after)), method="asymp") for p in range(12)]
    ranked = sorted(range(12), key=lambda place: tests[place].pvalue)
    count = next((k for k, p in enumerate(ranked) if tests[p].pvalue > 0.05 / (12 - k)), 12)
    expected = {f"c{place}": tests[place] for place in ranked[:count] if tests[place].statistic >= 0.05}
    found = drifts(encoder, before, after)
    assert {one.column: one.difference for one in found} == {name: test.statistic for name, test in expected.items()}
    assert {one.column: one.p_value for one in found} == {name: test.pvalue for name, test in expected.items()}
    assert [one.difference for one in found] == sorted((one.difference for one in found), reverse=True)


def test_of_rows_that_are_alike_nothing_is_worked_out_exactly(monkeypatch):
    monkeypatch.setattr("dapcal.models.drift._stats", None)
    encoder = Encoder(tuple(Number(f"c{place}", 0.0, 1.0, missing=False) for place in range(20)), "y")
    random = torch.Generator().manual_seed(0)
    before, after = (torch.randn(rows, encoder.width, generator=random) for rows in (1000, 500))
    before[:, 1::2], after[:, 1::2] = 0.0, 0.0  # nothing is missing
    assert drifts(encoder, before, after) == []


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("codes", [(), ((2.0,), (-1.0,), (3.0,))])
def test_levels_of_columns_with_codes_and_of_open_ones_are_told_apart(is_open, codes):
    """What the target was at a level, or a rare level, was taken for a mark of missing values."""
    street = Category("street", ("high", "low"), ("mews",), missing=False, open=is_open, codes=codes)
    encoder = Encoder((street,), "price")
    train, new = (
        pa.table({"street": [*["high"] * a, *["low"] * b, *["mews"] * c]}) for a, b, c in ((99, 51, 50), (0, 40, 0))
    )
    (found,) = drifts(encoder, encoder(train).x, encoder(new).x)
    assert found.what == "'low' 26 % in training, 100 % here"
    blank = pa.table({"street": [*[None] * 30, *["high"] * 5, *["low"] * 3, *["mews"] * 2]})
    (found,) = drifts(encoder, encoder(train).x, encoder(blank).x)
    assert found.what == "missing in 0 % of the rows in training, 75 % here"


def test_a_sample_of_a_stream_is_drawn_evenly():
    means = []
    for seed in range(40):
        sample = Sample(50, seed)
        for part in torch.arange(1000.0)[:, None].split(130):
            sample.add(part)
        assert sample().shape == (50, 1)
        means.append(float(sample().mean()))
    assert abs(np.mean(means) - 499.5) < 3 * 289 / np.sqrt(50 * 40)
