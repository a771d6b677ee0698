"""How good predictions are where a file has the target, against scikit-learn's numbers."""

from __future__ import annotations

import csv
import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from sklearn.metrics import precision_recall_fscore_support, root_mean_squared_error

from dapcal.models.against_targets import Judge, Quality
from dapcal.models.against_targets import words as in_words
from dapcal.models.row_notes import _spellings
from dapcal.models.table_fitting import fit
from dapcal.recipes import Recipe
from table_cases import run

TINY = Recipe(fast=True, members=2, hidden=(8,), epochs=6)


def rows(n: int, seed: int = 0) -> pa.Table:
    random = np.random.default_rng(seed)
    area, rooms = random.normal(80, 15, n).round(), random.integers(1, 6, n)
    price = 3000 * area + 10000 * rooms + random.normal(0, 9000, n)
    kind = np.where(area > 90, "large", np.where(area < 70, "small", "medium"))
    return pa.table({"area": area, "rooms": rooms, "price": price.round(), "kind": kind})


@pytest.fixture(scope="module")
def models():
    table = rows(300)
    return {name: fit(table, name, recipe=TINY, drop=[other]) for name, other in (("price", "kind"), ("kind", "price"))}


def judged(model, table: pa.Table, target: str, size: int = 70):
    judge = Judge(model)
    for start in range(0, len(table), size):
        part = table.slice(start, size)
        judge.add(model.columns(model.encoder(part).x), part[target])
    return judge


def test_classes_have_recall_and_precision(models):
    table = rows(200, seed=1)
    found = judged(models["kind"], table, "kind").found()
    predicted, true = models["kind"].predict(table).table["prediction"].to_pylist(), table["kind"].to_pylist()
    precision, recall, _, count = precision_recall_fscore_support(true, predicted, labels=models["kind"].classes)
    assert [own["rows"] for own in found.classes.values()] == count.tolist()
    for key, wanted in (("recall", recall), ("precision", precision)):
        assert [own[key] or 0.0 for own in found.classes.values()] == pytest.approx(wanted.tolist())
    assert found.value == pytest.approx(np.mean(np.array(true) == predicted))
    assert found.constant == pytest.approx(np.mean(np.array(true) == "medium"))


def test_numbers_have_an_error_and_coverage_by_group(models):
    model, table = models["price"], rows(200, seed=1)
    found = judged(model, table, "price", size=200).found()
    predicted, true = model.predict(table).table, table["price"].to_numpy()
    assert found.value == pytest.approx(root_mean_squared_error(true, predicted["prediction"].to_numpy()), rel=1e-5)
    inside = (predicted["lower"].to_numpy() <= true) & (true <= predicted["upper"].to_numpy())
    assert found.coverage == pytest.approx(inside.mean())
    mean = predicted["prediction"].to_numpy()
    fifth = sum((mean > np.percentile(mean, edge)).astype(int) for edge in (20, 40, 60, 80))
    wanted = [inside[fifth == place].mean() for place in range(5)]
    assert [group["coverage"] for group in found.by_group] == pytest.approx(wanted)
    assert sum(group["rows"] for group in found.by_group) == found.rows == 200


def test_rows_without_a_target_or_with_an_unknown_class_are_skipped(models):
    table = rows(6, seed=2)
    kinds = pa.array(["large", None, "small", "huge", "NA", "medium"])
    found = judged(models["kind"], table.set_column(3, "kind", kinds), "kind").found()
    assert (found.rows, found.skipped) == (3, 3)
    assert judged(models["kind"], table.set_column(3, "kind", pa.nulls(6, pa.string())), "kind").found() is None
    spoilt = judged(models["price"], table.set_column(2, "price", pa.array(["a lot"] * 6)), "price")
    assert spoilt.found() is None
    assert "the target in this file is not looked at: Row 1: column `price` holds 'a lot'" in spoilt.problem


def test_predict_and_report_tell_it(models, tmp_path):
    for name, words in (("price", "Off by "), ("kind", "Right in ")):
        models[name].save(tmp_path / "m.dap")
        with (tmp_path / "new.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            table = rows(80, seed=3)
            writer.writerow(table.column_names)
            writer.writerows(zip(*table.to_pydict().values(), strict=True))
        given = ["predict", tmp_path / "m.dap", tmp_path / "new.csv", "-o", tmp_path / "out.csv"]
        said = run(*given)
        assert words in said.stdout, said.output
        assert "e+0" not in said.stdout
        assert json.loads(run(*given, "--json").stdout)["quality"]["rows"] == 80
        page = tmp_path / "report.html"
        assert run("report", tmp_path / "m.dap", "--data", tmp_path / "new.csv", "-o", page).exit_code == 0
        assert "How good is it on the new data?" in page.read_text(encoding="utf-8")


def test_targets_beyond_all_numbers_leave_no_answer_but_null(models, tmp_path):
    models["price"].save(tmp_path / "m.dap")
    (tmp_path / "new.csv").write_text("area,rooms,price\n80,3,1e300\n")
    done = run("predict", tmp_path / "m.dap", tmp_path / "new.csv", "-o", tmp_path / "out.csv", "--json", "--quiet")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["quality"]["value"] is None


@pytest.mark.parametrize(("measure", "good", "bad"), [("RMSE", 1.0, 3.0), ("accuracy", 0.9, 0.5)])
def test_what_is_no_better_than_looking_at_no_column_is_told(measure, good, bad):
    of_classes = {"classes": {}, "coverage": None, "by_group": []}
    for value, is_told in ((good, False), (bad, True)):
        told = in_words(Quality(100, 0, measure, value, 2.0 if measure == "RMSE" else 0.6, **of_classes), "y", 0.95)
        assert ("no better than looking at no column" in told) == is_told


def test_a_level_is_said_to_be_misspelt_only_where_it_may_be():
    known = ["Spain", "Islands", "United Kingdom"]
    assert _spellings(Counter(["Pakistan", "Poland"]), known) == "'Pakistan', 'Poland'"
    assert _spellings(Counter(["Untied Kingdom"]), known) == "'Untied Kingdom'; did you mean 'United Kingdom'?"
