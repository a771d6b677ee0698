"""How good predictions are where a file has the target, against scikit-learn's numbers."""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import binomtest
from sklearn.metrics import precision_recall_fscore_support, root_mean_squared_error

from dapcal.models.against_targets import Judge, Quality
from dapcal.models.against_targets import words as in_words
from dapcal.models.drift import Sample
from dapcal.models.judged_rows import CategoryCounts
from dapcal.models.row_notes import _spellings
from dapcal.models.table_fitting import fit
from dapcal.recipes import Recipe
from dapcal.tables.columns import Category, Number
from table_cases import run

TINY = Recipe(fast=True, members=2, hidden=(8,), epochs=6)


def rows(n: int, seed: int = 0) -> pa.Table:
    random = np.random.default_rng(seed)
    area, rooms = random.normal(80, 15, n).round(), random.integers(1, 6, n)
    price = 3000 * area + 10000 * rooms + random.normal(0, 9000, n)
    kind = np.where(area > 90, "large", np.where(area < 70, "small", "medium"))
    return pa.table({"area": area, "rooms": rooms, "price": price.round(), "kind": kind})


def with_cities(n: int, seed: int = 0) -> pa.Table:
    """Prices of Rome are noisier than what a model learns from these rows."""
    table, random = rows(n, seed), np.random.default_rng(seed + 100)
    city = random.choice(["Bern", "Oslo", "Rome", "Lyon"], n, p=[0.4, 0.4, 0.15, 0.05])
    price = table["price"].to_numpy() + np.where(city == "Rome", random.normal(0, 200_000, n) * (seed > 0), 0.0)
    return table.set_column(2, "price", pa.array(price)).set_column(3, "city", pa.array(city))


@pytest.fixture(scope="module")
def models():
    table = rows(300)
    return {name: fit(table, name, recipe=TINY, drop=[other]) for name, other in (("price", "kind"), ("kind", "price"))}


def judged(model, table: pa.Table, target: str, size: int = 70):
    judge = Judge(model, keep=True)
    for start in range(0, len(table), size):
        part = table.slice(start, size)
        x = model.encoder(part).x
        judge.add(model.columns(x), part[target], x)
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


def test_rows_are_kept_for_plots(models):
    for name, unknown in (("price", None), ("kind", "huge")):
        model, table = models[name], rows(200, seed=1)
        column = table[name].to_pylist()
        column[3] = unknown
        table = table.set_column(table.column_names.index(name), name, pa.array(column))
        found = judged(model, table, name).judged()
        predicted, known = model.predict(table).table, np.arange(200) != 3
        assert found.rows == len(found.sample.true) == 199
        if name == "price":
            assert found.sample.true.tolist() == table[name].to_numpy()[known].tolist()
            for mine, wanted in (("predicted", "prediction"), ("lower", "lower"), ("upper", "upper")):
                assert getattr(found.sample, mine).numpy() == pytest.approx(predicted[wanted].to_numpy()[known])
            assert found.sample.is_flagged.tolist() == predicted["ood"].to_numpy()[known].tolist()
            inside = (found.sample.lower <= found.sample.true) & (found.sample.true <= found.sample.upper)
            assert found.coverage == float(inside.double().mean())
        else:
            told = np.array(model.classes)[found.sample.true]
            assert told.tolist() == [value for value in column if value != unknown]
            wanted = np.stack([predicted[f"probability_{label}"].to_numpy()[known] for label in model.classes], 1)
            assert found.sample.probabilities.numpy() == pytest.approx(wanted)


def test_what_is_kept_is_bounded_and_drawn_from_all_rows(models, monkeypatch):
    monkeypatch.setattr(Sample.__init__, "__defaults__", (50, 0))
    table = rows(400, seed=1)
    first, second = (judged(models["price"], table, "price").judged() for _ in range(2))
    assert (first.rows, len(first.sample.true)) == (400, 50)
    assert first.sample.true.tolist() == second.sample.true.tolist()
    place = {price: place for place, price in enumerate(table["price"].to_pylist())}
    assert 100 < np.mean([place[price] for price in first.sample.true.tolist()]) < 300


def test_nothing_is_kept_unasked(models):
    judge = Judge(models["price"])
    table = rows(40)
    judge.add(models["price"].columns(models["price"].encoder(table).x), table["price"])
    assert judge.found() is not None
    assert judge.judged() is None


def test_coverage_is_told_of_categories_with_enough_rows():
    model, table = fit(with_cities(300), "price", recipe=TINY), with_cities(400, seed=1)
    found = judged(model, table, "price").judged()
    predicted, city, true = model.predict(table).table, table["city"].to_numpy(), table["price"].to_numpy()
    inside = (predicted["lower"].to_numpy() <= true) & (true <= predicted["upper"].to_numpy())
    wanted = {name: inside[city == name].mean() for name in ("Bern", "Oslo", "Rome")}  # and not Lyon
    assert {group.category: group.coverage for group in found.by_category} == pytest.approx(wanted)
    assert [group.column for group in found.by_category] == ["city"] * 3
    assert found.by_category[0].category == "Rome"
    assert [group.coverage for group in found.by_category] == sorted(wanted.values())
    assert [group.rows for group in found.by_category] == [
        (city == group.category).sum() for group in found.by_category
    ]
    assert [group.is_low for group in found.by_category] == [True, False, False]


def test_categories_are_low_by_holms_procedure():
    names = tuple(f"c{place}" for place in range(6))
    encoder = SimpleNamespace(columns=[Number("n", 0.0, 1.0, False), Category("kind", names, (), False)])
    counts = CategoryCounts(encoder)
    inside = [100, 90, 91, 92, 60, 29]
    sizes = [100, 100, 100, 100, 100, 29]  # the last is too small
    place = np.repeat(np.arange(6), sizes)
    x = np.concatenate([np.zeros((529, 2)), np.eye(6, 8)[place]], 1)
    counts.add(x, np.concatenate([np.arange(size) < count for size, count in zip(sizes, inside, strict=True)]))
    p = [binomtest(count, 100, 0.95, alternative="less").pvalue for count in inside[:5]]
    wanted = rejected_by_holm(p)
    found = {group.category: group.is_low for group in counts.found()}
    assert found == {f"c{place}": wanted[place] for place in range(5)}
    assert [group.category for group in counts.found()] == ["c4", "c1", "c2", "c3", "c0"]


def rejected_by_holm(p: list[float], level: float = 0.05) -> list[bool]:
    """Holm's procedure, written as its adjusted p-values."""
    order, adjusted, largest = np.argsort(p), np.zeros(len(p)), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, (len(p) - rank) * p[place])
        adjusted[place] = largest
    return (adjusted <= level).tolist()


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
        csv_of(rows(80, seed=3), tmp_path / "new.csv")
        given = ["predict", tmp_path / "m.dap", tmp_path / "new.csv", "-o", tmp_path / "out.csv"]
        said = run(*given)
        assert words in said.stdout, said.output
        assert "e+0" not in said.stdout
        assert json.loads(run(*given, "--json").stdout)["quality"]["rows"] == 80
        page = tmp_path / "report.html"
        assert run("report", tmp_path / "m.dap", "--data", tmp_path / "new.csv", "-o", page).exit_code == 0
        shown = page.read_text(encoding="utf-8")
        assert "How good is it on the new data?" in shown
        assert ("How near are its predictions?" in shown) == (name == "price")
        assert ("Does it tell the classes apart?" in shown) == (name == "kind")


def test_the_report_says_why_targets_are_not_looked_at(models, tmp_path):
    models["price"].save(tmp_path / "m.dap")
    (tmp_path / "new.csv").write_text("area,rooms,price\n80,3,a lot\n")
    said = run("report", tmp_path / "m.dap", "--data", tmp_path / "new.csv", "-o", tmp_path / "report.html")
    assert said.exit_code == 0, said.output
    assert "the target in this file is not looked at" in said.stderr


def test_the_report_judges_no_more_rows_than_it_is_about(models, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["dapcal.cli.report"], "MOST_NEW", 50)
    models["price"].save(tmp_path / "m.dap")
    csv_of(rows(80, seed=3), tmp_path / "new.csv")
    page = tmp_path / "report.html"
    assert run("report", tmp_path / "m.dap", "--data", tmp_path / "new.csv", "-o", page).exit_code == 0
    assert "All 50 rows." in page.read_text(encoding="utf-8")


def csv_of(table: pa.Table, path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(table.column_names)
        writer.writerows(zip(*table.to_pydict().values(), strict=True))


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


def test_rows_that_were_not_compared_are_told():
    classes = Quality(100, 2, "accuracy", 0.9, 0.6, {}, None, [])
    assert ". 2 other rows have no `y`, or a class that the model does not know" in in_words(classes, "y", 0.95)
    numbers = Quality(100, 1, "RMSE", 0.9, 2.0, {}, 0.95, [])
    assert in_words(numbers, "y", 0.95).endswith(". 1 other row has no `y`")
    assert "other row" not in in_words(Quality(100, 0, "RMSE", 0.9, 2.0, {}, 0.95, []), "y", 0.95)
