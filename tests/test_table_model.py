"""Models of tables: what is predicted, kept in the file, and told about."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

import dapcal
from dapcal import recipes
from dapcal.adjust import Unchanged
from dapcal.calibrate import Calibrated
from dapcal.models import load, table
from dapcal.models.table import TableModel
from dapcal.models.table_fitting import fit
from dapcal.models.table_summary import summarise, words
from dapcal.recipes import Recipe

RECIPE = Recipe(hidden=(16,), epochs=15, members=3)


def rows(n: int = 240, seed: int = 0) -> pa.Table:
    """A number, one with gaps, a category, and targets of both kinds."""
    random = np.random.default_rng(seed)
    area, age = random.normal(80, 20, n), random.uniform(0, 50, n)
    city = random.choice(["Rome", "Oslo", "Lima"], n)
    price = 3 * area - age + 40 * (city == "Rome") + random.normal(0, 5, n)
    return pa.table(
        {
            "area": area,
            "age": pa.array(age, mask=random.random(n) < 0.1),
            "city": city,
            "price": price,
            "dear": np.where(price > np.median(price), "yes", "no"),
        }
    )


@pytest.fixture(scope="module")
def regression() -> TableModel:
    return fit(rows(), "price", recipe=RECIPE, drop=["dear"])


@pytest.fixture(scope="module")
def classification() -> TableModel:
    return fit(rows(), "dear", recipe=RECIPE, drop=["price"])


def test_numbers_come_back_in_the_unit_of_the_table(regression: TableModel):
    new = rows(50, seed=1)
    found = regression.predict(new, level=0.8).table
    direct = regression.calibrated(regression.encoder(new).x)
    price = rows()["price"].to_numpy()
    center, scale = price.mean(), price.std()
    expected = {
        "prediction": regression.calibrated.posterior.likelihood.bounded(direct.mean)[:, 0],
        "lower": direct.interval(0.8).lower[:, 0],
        "upper": direct.interval(0.8).upper[:, 0],
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], center + scale * value.double().numpy(), rtol=1e-6, atol=1e-4)
    both = np.array(found["epistemic"]) ** 2 + np.array(found["aleatoric"]) ** 2
    np.testing.assert_allclose(both, scale**2 * direct.variance[:, 0].double().numpy(), rtol=1e-5)
    error = np.array(found["prediction"]) - new["price"].to_numpy()
    assert np.sqrt((error**2).mean()) < 0.6 * new["price"].to_numpy().std()


def test_classes_come_back_by_name(classification: TableModel):
    new = rows(50, seed=1)
    found = classification.predict(new).table
    direct = classification.calibrated(classification.encoder(new).x)
    assert found.column_names[:3] == ["prediction", "probability_no", "probability_yes"]
    np.testing.assert_allclose(found["probability_yes"], direct.probs[:, 1], rtol=1e-6)
    assert found["prediction"].to_pylist() == [("no", "yes")[place] for place in direct.probs.argmax(1).tolist()]
    assert np.mean(np.array(found["prediction"]) == np.array(new["dear"])) > 0.8


def test_a_row_far_away_is_flagged_and_less_sure(regression: TableModel):
    near = rows(1, seed=2)
    far = near.set_column(0, "area", pa.array([2000.0]))
    one, two = (regression.predict(table).table.to_pylist()[0] for table in (near, far))
    assert not one["ood"]
    assert two["ood"]
    assert two["epistemic"] > 5 * one["epistemic"]
    assert two["distance"] > one["distance"]
    assert regression.predict(far, alpha=0.0).table["ood"].to_pylist() == [False]


def test_batches_change_nothing(classification: TableModel, monkeypatch):
    whole = classification.predict(rows(30, seed=3)).table
    monkeypatch.setattr(table, "_NUMBERS_AT_ONCE", 7 * 50 * 2)
    assert classification.rows_at_once == 7
    parts = classification.predict(rows(30, seed=3)).table
    assert parts.column_names == whole.column_names
    for name in ("reason", "missing", "unusual"):
        assert parts[name].to_pylist() == whole[name].to_pylist()
    for name in whole.column_names[1:-3]:
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-4, atol=1e-6)


def test_no_rows_are_refused(classification: TableModel):
    with pytest.raises(ValueError, match="Expected at least one input"):
        classification.predict(rows(5).slice(0, 0))


@pytest.mark.parametrize("posterior", recipes.POSTERIORS)
def test_a_saved_model_predicts_the_same(posterior: str, tmp_path: Path):
    fast = posterior != "ensemble"  # which is chosen by regions, and the choice is in its notes
    recipe = Recipe(posterior=posterior, hidden=(8,), epochs=4, members=2, draws=5, fast=fast)
    model = fit(rows(120), "price", recipe=recipe, drop=["dear"])
    model.save(tmp_path / "m.dap")
    loaded = load(tmp_path / "m.dap")
    new = rows(20, seed=1)
    assert loaded.predict(new).table.equals(model.predict(new).table)
    assert loaded.encoder == model.encoder
    assert loaded.recipe == model.recipe
    assert loaded.notes == model.notes
    assert torch.equal(loaded.train.x, model.train.x)
    assert torch.equal(loaded.held_out.y, model.held_out.y)


def test_the_file_is_also_one_for_python(regression: TableModel, tmp_path: Path):
    regression.save(tmp_path / "m.dap")
    network = recipes.network(regression.encoder.width, 1, RECIPE)
    loaded = dapcal.load(tmp_path / "m.dap", network)
    x = regression.held_out.x[:5]
    assert torch.equal(loaded(x).mean, regression.calibrated(x).mean)


def test_a_file_of_another_kind_is_refused(regression: TableModel, tmp_path: Path):
    regression.calibrated.save(tmp_path / "m.dap")
    with pytest.raises(
        ValueError, match=r"was not made by `dapcal fit` or `dapcal calibrate`; load it .* dapcal\.load"
    ):
        load(tmp_path / "m.dap")


def test_notes_tell_what_was_decided(tmp_path: Path):
    table = rows(100)
    table = table.set_column(4, "dear", pa.array([None, *table["dear"].to_pylist()[1:]]))
    table = table.append_column("name", pa.array([f"house{n}" for n in range(100)]))
    model = fit(table, "dear", recipe=RECIPE)
    text = "\n".join(model.notes)
    assert "`dear` holds texts: classification" in text
    assert "1 of 100 rows have no `dear`: left out" in text
    assert "column `name` is different in every row" in text
    assert len(model.train.x) + len(model.held_out.x) == 99


def test_the_subject_of_a_report_shows_rows_in_words(regression: TableModel):
    subject = regression.subject("house.dap")
    shown = subject.show(regression.encoder(rows(3, seed=5)).x)
    assert [row["city"] for row in shown] == rows(3, seed=5)["city"].to_pylist()
    assert subject.target == "price"
    assert subject.axes is None
    assert set(subject.features) == {"area", "age", "city"}


def test_two_numbers_have_a_map():
    table = rows(100).select(["area", "price", "dear"])
    subject = fit(table, "dear", recipe=RECIPE).subject("m")
    assert subject.axes is not None
    assert [axis.name for axis in subject.axes] == ["area", "price"]
    assert subject.axes[0].center == pytest.approx(table["area"].to_numpy().mean())


# Summary


def test_the_summary_is_measured_on_held_out_rows(regression: TableModel):
    summary = summarise(regression)
    (chose, (x, y)) = regression.halves()
    judging = regression.calibrated.judging  # all rows are learnt in the end, these too
    prediction, scale = judging(x), rows()["price"].to_numpy().std()
    assert summary.rows == len(x)
    assert summary.train_rows + summary.held_out == 240
    assert summary.rows == summary.held_out // 2
    assert len(regression.calibrated.evidence.held_out) == len(x), "p-values are read from these rows"
    assert summary.value == pytest.approx(scale * float(((prediction.mean - y) ** 2).mean().sqrt()), rel=1e-5)
    assert summary.constant == pytest.approx(
        scale * float(((regression.train.y.mean() - y) ** 2).mean().sqrt()), rel=1e-5
    )
    assert summary.nll == pytest.approx(float(-prediction.log_prob(y).mean()) + math.log(scale), rel=1e-5)
    assert summary.base_nll == pytest.approx(float(-prediction.base.log_prob(y).mean()) + math.log(scale), rel=1e-5)
    lower, upper = judging(chose.x).interval(0.95)  # their width comes from the other half
    assert summary.coverage == pytest.approx(float(((lower <= chose.y) & (chose.y <= upper)).double().mean()))
    others = regression.calibrated(chose.x).ood_p_value
    assert summary.flagged == pytest.approx(float((others <= 0.05).double().mean()))
    assert next(iter(summary.important)) == "area"
    assert summary.important["area"] > summary.important["city"] > 0


def test_the_summary_of_classes(classification: TableModel):
    summary = summarise(classification)
    x, y = classification.halves()[1]
    right = classification.calibrated(x).probs.argmax(1) == y
    assert summary.value == pytest.approx(float(right.double().mean()))
    majority = classification.train.y.mode().values
    assert summary.constant == pytest.approx(float((y == majority).double().mean()))
    assert summary.coverage is None


def test_the_widening_is_that_of_twice_the_radius(regression: TableModel):
    summary = summarise(regression)
    calibrated: Calibrated = regression.calibrated
    d0 = max((2 * s.radius.start - s.radius.start) / s.radius.unit for s in calibrated.distance.spaces if s.radius)
    assert summary.widening == pytest.approx(1 + calibrated.factor * d0, rel=1e-5)


def test_three_lines_of_words(regression: TableModel, classification: TableModel):
    for model, target, good in ((regression, "price", "RMSE"), (classification, "dear", "most frequent class")):
        lines = words(summarise(model), target).splitlines()
        assert len(lines) == 3
        assert good in lines[0]
        assert "`area`" in lines[1]
        changes = model.calibrated.adjust.heeds_distance
        assert lines[2].startswith("At twice the usual distance" if changes else "Distance from the training rows does")


def test_rows_that_occur_often_are_noted():
    """Half of the rows held out would have a twin in training."""
    twice = pa.concat_tables([rows(40), rows(40), rows(20, seed=1)])
    notes = fit(twice, "price", recipe=Recipe(hidden=(4,), epochs=1, members=2, fast=True)).notes
    assert any(note.startswith("40 of 100 rows are copies of others") for note in notes)


def test_classes_that_differ_in_capitals_alone_are_noted():
    table = rows(60)
    dear = ["Yes" if i % 3 else "YES" for i in range(60)]
    table = table.set_column(table.column_names.index("dear"), "dear", pa.array(dear))
    notes = fit(table, "dear", recipe=Recipe(hidden=(4,), epochs=1, members=2, fast=True)).notes
    assert any("`dear` holds 'YES', 'Yes', which count as different" in note for note in notes)


def test_a_class_of_a_single_row_does_not_stop_the_fit(tmp_path: Path):
    table = rows(120)
    kinds = ["once" if place == 7 else ("high" if place % 2 else "low") for place in range(120)]
    table = table.append_column("kind", pa.array(kinds))
    model = fit(table, "kind", recipe=Recipe(hidden=(4,), epochs=1, members=2, fast=True))
    assert model.classes == ("high", "low")
    assert len(model.train.x) + len(model.held_out.x) == 119
    assert any("1 of 3 classes of `kind` has a single row ('once')" in note for note in model.notes)


def test_a_model_that_has_learnt_nothing_is_told(regression: TableModel, classification: TableModel):
    for model in (regression, classification):
        summary = summarise(model)
        assert "no better than looking at no column" not in words(summary, "price")
        assert "no better than looking at no column" in words(replace(summary, value=summary.constant), "price")


@pytest.mark.parametrize(
    ("widening", "told"), [(1.0, "hardly grows"), (2.5, "is 2.5 times"), (73.0, "is more than 10 times")]
)
def test_growth_is_told_in_numbers_that_mean_something(regression: TableModel, widening: float, told: str):
    assert told in words(replace(summarise(regression), widening=widening), "price")


def test_what_gap_cross_validation_chose_comes_back_from_a_file(regression: TableModel, tmp_path: Path):
    assert regression.gaps is not None
    regression.save(tmp_path / "model.dap")
    again = load(tmp_path / "model.dap")
    assert again.gaps == regression.gaps
    assert again.subject("model").gaps == regression.gaps


def test_a_model_that_distance_does_not_change_says_so(regression: TableModel):
    unchanged = replace(regression, calibrated=replace(regression.calibrated, adjust=Unchanged()))
    summary = summarise(unchanged)
    assert (summary.adjustment, summary.widening) == ("none", 1.0)
    assert "Distance from the training rows does not change its predictions" in words(summary, "y")


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_a_row_alone_is_answered_as_it_is_among_others(kind, request):
    """Rows of a service: one by one they go other ways than many, and differ by the rounding of float32 alone."""
    model = request.getfixturevalue(kind)
    given = rows(40, seed=3).select(["area", "age", "city"]).to_pylist()
    given[3]["city"], given[5]["area"] = "Paris", 1e4
    many = model.columns(model.encode(given))
    alone = [model.columns(model.encode([row])) for row in given]
    for name, values in many.items():
        found = np.concatenate([columns[name] for columns in alone])
        if values.dtype == object:
            assert found.tolist() == values.tolist(), name
        else:
            np.testing.assert_allclose(found.astype(float), values.astype(float), rtol=2e-3, atol=1e-5, err_msg=name)


def test_levels_that_only_new_rows_have_are_not_flagged_more_often_than_is_said():
    """Categories of many levels: a new row has now and then one that no row had, and so have the rows that judge."""
    shares = []
    for seed in range(8):
        draws = np.random.default_rng(seed)
        often = 1 / np.arange(1, 41) ** 1.2
        columns = {f"c{i}": draws.choice(40, 1300, p=often / often.sum()).astype(str) for i in range(3)}
        x = draws.normal(size=1300)
        table = pa.table({**columns, "x": x, "y": x + 0.3 * draws.normal(size=1300)})
        recipe = Recipe(hidden=(8,), epochs=3, members=2, fast=True, seed=seed, validation=0.4)
        model = fit(table.slice(0, 300), "y", recipe=recipe)
        found = model.predict(table.slice(300).drop_columns(["y"])).table["ood_p_value"].to_numpy()
        shares.append(float((found <= 0.05 + 1e-9).mean()))
    assert np.mean(shares) <= 0.05 + 3 * np.std(shares) / math.sqrt(len(shares))
