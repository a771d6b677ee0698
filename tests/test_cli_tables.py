"""`dapcal fit`, `predict`, `report`, `explain` and `doctor` as people call them."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import dapcal
from dapcal.cli import app
from dapcal.models import load
from dapcal.models.table import TableModel
from table_cases import SMALL, refused, run, write_rows


@pytest.fixture
def folder(houses: Path) -> Path:
    """train.csv, new.csv, and house.dap."""
    return houses


def test_fit_tells_what_it_learnt(folder: Path, tmp_path: Path):
    result = run("fit", folder / "train.csv", "--target", "price", "-o", tmp_path / "m.dap", *SMALL)
    assert result.exit_code == 0, result.output
    for word in ("RMSE", "NLL", "phi", "radius", "176 to learn from, 44 held out", "`area`", "flagged", "Saved to"):
        assert word in result.stdout
    assert "regression" in result.stderr, "the guess is said"
    assert "`id` is different in every row" in result.stderr


def test_fit_as_json_is_json_alone(folder: Path, tmp_path: Path):
    result = run("fit", folder / "train.csv", "--target", "price", "-o", tmp_path / "m.dap", *SMALL, "--json", "-q")
    told = json.loads(result.stdout)
    assert told["measure"] == "RMSE"
    assert told["held_out"] == 44
    assert told["rows"] == 22
    assert told["file"] == str(tmp_path / "m.dap")
    assert any("left out" in note for note in told["notes"])
    assert told["gaps"]["chosen"] in ("none", "Inflate", "Revert")
    assert result.stderr == ""
    result = run(
        "fit", folder / "train.csv", "--target", "price", "-o", tmp_path / "m.dap", *SMALL, "--json", "-q", "--fast"
    )
    told = json.loads(result.stdout)
    assert (told["gaps"], told["adjustment"]) == (None, "Inflate")


def test_quiet_says_nothing(folder: Path, tmp_path: Path):
    result = run("fit", folder / "train.csv", "--target", "price", "-o", tmp_path / "m.dap", *SMALL, "--quiet")
    assert result.exit_code == 0
    assert result.output == ""


@pytest.mark.parametrize("posterior", ["tabm", "laplace", "variational", "swag", "dropout"])
def test_every_posterior_can_be_asked_for(posterior: str, folder: Path, tmp_path: Path):
    arguments = ["--target", "city", "--posterior", posterior, "-o", tmp_path / "m.dap", *SMALL, "--fast"]
    result = run("fit", folder / "train.csv", *arguments, "--seed", "1", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["task"] == "classification"
    assert load(tmp_path / "m.dap").recipe.posterior == posterior
    assert load(tmp_path / "m.dap").recipe.seed == 1


def test_intervals_stay_within_the_bounds_of_the_target(folder: Path, tmp_path: Path):
    """--bounds, or 0 where no training row is below it, which is told."""
    train, model, out = folder / "train.csv", tmp_path / "m.dap", tmp_path / "out.csv"
    result = run("fit", train, "--target", "area", "-o", model, *SMALL, "--fast", "--bounds", "1,")
    assert result.exit_code == 0, result.output
    run("predict", model, folder / "train.csv", "-o", out, "--level", "0.999999")
    with out.open() as file:
        lower = [float(row["lower"]) for row in csv.DictReader(file)]
    assert min(lower) == pytest.approx(1)
    assert "no `area` is below 0" in run("fit", train, "--target", "area", "-o", model, *SMALL, "--fast").stderr
    run("predict", model, folder / "train.csv", "-o", out, "--level", "0.999999")
    with out.open() as file:
        assert min(float(row["lower"]) for row in csv.DictReader(file)) == 0
    for bounds, words in (("100,", "beyond --bounds"), ("9,1", "exchange"), ("a", "least,greatest")):
        refused(run("fit", train, "--target", "area", "-o", model, *SMALL, "--bounds", bounds), words)
    refused(run("fit", train, "--target", "city", "-o", model, *SMALL, "--bounds", "0,"), "no bounds")


def test_too_few_rows_to_flag_any_are_told(tmp_path: Path):
    write_rows(tmp_path / "few.csv", 40)
    result = run("fit", tmp_path / "few.csv", "--target", "price", "-o", tmp_path / "m.dap", *SMALL)
    assert "or more, so nothing can be flagged at 0.05" in result.stderr
    arguments = ["predict", tmp_path / "m.dap", tmp_path / "few.csv", "-o", tmp_path / "o.csv", "--alpha"]
    assert "nothing can be flagged at 0.01" in run(*arguments, "0.01").stderr
    assert "nothing can be flagged" not in run(*arguments, "0.2").stderr


def test_options_of_fit_are_heeded(folder: Path, tmp_path: Path):
    arguments = ["--target", "rooms", "--task", "regression", "--drop", "city", "--drop", "id", "--validation", "0.5"]
    result = run("fit", folder / "train.csv", *arguments, "-o", tmp_path / "m.dap", *SMALL, "--fast")
    assert result.exit_code == 0, result.output
    model = load(tmp_path / "m.dap")
    assert model.task == "regression"
    assert [column.name for column in model.encoder.columns] == ["area", "price"]
    assert len(model.train.x) == pytest.approx(len(model.held_out.x), abs=2)
    assert model.recipe.hidden == (8,)
    arguments = ["--target", "price", "--category", "rooms", "-o", tmp_path / "c.dap", *SMALL, "--fast"]
    assert run("fit", folder / "train.csv", *arguments).exit_code == 0
    assert load(tmp_path / "c.dap").encoder.expected["rooms"] == "category"


def test_ids_are_left_out_unless_they_are_asked_for(tmp_path: Path):
    random = np.random.default_rng(0)
    rows = [
        f"{i},{a:.3f},{2 * a:.2f}"
        for i, a in zip(9000 + random.permutation(300)[:200], random.random(200), strict=True)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["customer,area,price", *rows]))
    arguments = ["fit", tmp_path / "t.csv", "--target", "price", "-o", tmp_path / "m.dap", *SMALL, "--fast"]
    told = " ".join(run(*arguments).stderr.split())
    assert "column `customer` numbers the rows (whole numbers, none of them twice): left out; --number customer" in told
    assert [column.name for column in load(tmp_path / "m.dap").encoder.columns] == ["area"]
    assert run(*arguments, "--number", "customer").exit_code == 0
    assert [column.name for column in load(tmp_path / "m.dap").encoder.columns] == ["customer", "area"]


@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet"])
def test_predict_gives_a_row_for_every_row(suffix: str, folder: Path, tmp_path: Path):
    out = tmp_path / f"out.{suffix}"
    result = run("predict", folder / "house.dap", folder / "new.csv", "-o", out, "--keep", "id", "--level", "0.8")
    assert result.exit_code == 0, result.output
    if suffix == "parquet":
        found = pq.read_table(out).to_pylist()
    else:
        with out.open(newline="") as file:
            found = list(csv.DictReader(file, delimiter="\t" if suffix == "tsv" else ","))
    assert [row["id"] for row in found] == [f"h{i}" for i in range(30)]
    model = load(folder / "house.dap")
    direct = model.predict(models_table(folder / "new.csv", model), level=0.8).table
    for name in ("prediction", "lower", "upper", "epistemic", "aleatoric", "distance", "ood_p_value"):
        np.testing.assert_allclose([float(row[name]) for row in found], direct[name], rtol=1e-6)
    assert "of 30 rows" in result.stdout


def models_table(path: Path, model: TableModel) -> pa.Table:
    from dapcal.tables import stream

    return pa.concat_tables(stream(path, model.encoder.expected))


def test_columns_are_matched_by_name(folder: Path, tmp_path: Path):
    table = pa.table({"city": ["Rome"], "extra": [1], "rooms": [2.0], "area": [80.0]})
    pq.write_table(table, tmp_path / "other.parquet")
    pq.write_table(table.select(["area", "rooms", "city"]), tmp_path / "same.parquet")
    for name in ("other", "same"):
        result = run("predict", folder / "house.dap", tmp_path / f"{name}.parquet", "-o", tmp_path / f"{name}.csv")
        assert result.exit_code == 0, result.output
        assert ("columns that the model does not know were ignored: extra" in result.stderr) == (name == "other")
    assert (tmp_path / "other.csv").read_text() == (tmp_path / "same.csv").read_text()


def test_unknown_categories_and_missing_values_are_told(folder: Path, tmp_path: Path):
    (tmp_path / "new.csv").write_text("area,rooms,city\n80,2,Paris\n,2,Rome\n80,,Oslo\n")
    result = run("predict", folder / "house.dap", tmp_path / "new.csv", "-o", tmp_path / "out.csv", "--json")
    told = json.loads(result.stdout)
    assert told["rows"] == 3
    text = " ".join(told["notes"])
    assert "`city`: 1 row with a category that training never saw" in text
    assert "`area`: 1 row without a value, none in training; there the mean stands for it" in text
    assert "`rooms`" not in text, "training had missing rooms"


def test_alpha_decides_what_is_flagged(folder: Path, tmp_path: Path):
    for alpha, share in (("0", 0), ("1", 30)):
        arguments = ["predict", folder / "house.dap", folder / "new.csv", "-o", tmp_path / "o.csv", "--alpha", alpha]
        assert json.loads(run(*arguments, "--json").stdout)["ood"] == share


def test_report_and_explain(folder: Path, tmp_path: Path):
    result = run("report", folder / "house.dap", "--data", folder / "new.csv", "-o", tmp_path / "r.html")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "house.dap" in page
    assert "new.csv" in page
    result = run("explain", folder / "house.dap", folder / "new.csv", "--row", "7", "--neighbours", "3")
    assert result.exit_code == 0, result.output
    assert "Row 7: `price`" in result.stdout
    assert result.stdout.count("training row at") == 3
    told = json.loads(run("explain", folder / "house.dap", folder / "new.csv", "--row", "7", "--json").stdout)
    assert told["row"] == 7
    assert [len(near["columns"]) for near in told["neighbours"]] == [3] * 5
    model = load(folder / "house.dap")
    predicted = model.predict(models_table(folder / "new.csv", model)).table.slice(6, 1).to_pylist()[0]
    for name, column in (("mean", "prediction"), ("lower", "lower"), ("upper", "upper"), ("epistemic", "epistemic")):
        assert told["after"][name] == pytest.approx([predicted[column]], rel=1e-4), name
    assert told["p_value"] == pytest.approx(predicted["ood_p_value"])


def test_explain_names_classes(folder: Path, tmp_path: Path):
    arguments = ["--target", "city", "--drop", "price", "-o", tmp_path / "m.dap", *SMALL, "--fast", "-q"]
    assert run("fit", folder / "train.csv", *arguments).exit_code == 0
    told = json.loads(run("explain", tmp_path / "m.dap", folder / "new.csv", "--row", "7", "--json").stdout)
    run("predict", tmp_path / "m.dap", folder / "new.csv", "-o", tmp_path / "o.csv")
    with (tmp_path / "o.csv").open(newline="") as file:
        predicted = list(csv.DictReader(file))[6]
    expected = {name: float(predicted[f"probability_{name}"]) for name in ("Oslo", "Rome")}
    assert told["after"]["probabilities"] == pytest.approx(expected, rel=1e-4)
    assert {near["target"] for near in told["neighbours"]} <= {"Oslo", "Rome"}


def test_explain_names_a_far_column(folder: Path, tmp_path: Path):
    (tmp_path / "far.csv").write_text("area,rooms,city\n9000,2,Rome\n")
    result = run("explain", folder / "house.dap", tmp_path / "far.csv")
    assert "Out of distribution: yes" in result.stdout
    assert "`area` = 9000" in result.stdout
    assert "outside all training values" in result.stdout


def test_doctor_tells_versions_extras_and_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("DAPCAL_DATA", str(tmp_path))
    monkeypatch.setenv("DAPCAL_CACHE", str(tmp_path / "cache"))
    told = json.loads(run("doctor", "--json").stdout)
    assert told["versions"]["dapcal"] == dapcal.__version__
    assert told["versions"]["torch"] == torch.__version__.partition("+")[0] or "+" in told["versions"]["torch"]
    assert "cpu" in told["devices"]
    assert told["extras"]["cli"]["typer"] is not None
    assert told["data"]["sets"]["mnist"] is False
    text = run("doctor").stdout
    assert "DAPCAL_DATA is " + str(tmp_path) in text


def test_doctor_works_where_extras_are_missing(monkeypatch: pytest.MonkeyPatch):
    """Before: exit code 1 without matplotlib, which `pip install dapcal[cli]` does not bring."""
    monkeypatch.setitem(sys.modules, "dapcal.experiments.datasets.files", None)
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "without the extra experiments" in result.stdout


def test_every_command_has_help_with_an_example():
    listed = re.findall(r"^\W*([a-z]+) ", run("--help").stdout.partition("Commands")[2], flags=re.MULTILINE)
    commands = {command.callback.__name__ for command in app.registered_commands if command.callback}
    assert {"fit", "predict", "report", "explain", "serve", "demo", "reproduce", "doctor"} <= commands
    assert commands <= set(listed)
    for command in commands:
        text = " ".join(run(command, "--help").stdout.split())
        assert f"Example: dapcal {command}" in text, command
        assert "--json" in text
        assert "--quiet" in text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_command_runs_on_a_gpu(folder: Path, tmp_path: Path):
    model, new = tmp_path / "m.dap", folder / "new.csv"
    assert run("fit", folder / "train.csv", "--target", "price", "-o", model, *SMALL, "--device", "cuda").exit_code == 0
    for device in ("cpu", "cuda"):
        assert run("predict", model, new, "-o", tmp_path / f"{device}.csv", "--device", device).exit_code == 0
        assert run("report", model, "--data", new, "-o", tmp_path / "r.html", "--device", device).exit_code == 0
        assert run("explain", model, new, "--device", device).exit_code == 0
    one, two = (list(csv.DictReader((tmp_path / f"{device}.csv").open())) for device in ("cpu", "cuda"))
    predictions = [[float(row["prediction"]) for row in rows] for rows in (one, two)]
    np.testing.assert_allclose(*predictions, rtol=1e-3)


def test_intervals_of_few_rows_come_with_a_note(folder: Path, tmp_path: Path):
    """Fewer judging rows than a level takes: said by `fit`, and by `predict` for the level that was asked."""
    few, model = tmp_path / "few.csv", tmp_path / "few.dap"
    few.write_text("\n".join((folder / "train.csv").read_text().splitlines()[:31]))
    fitted = run("fit", few, "--target", "price", "-o", model, *SMALL, "--fast")
    judging = len(load(model).calibrated.judges)
    assert judging < 19
    told = f"{judging} judging rows are too few for intervals of 95 %"
    assert told in fitted.stderr
    for level, words in ((0.95, "(19 are needed)"), (0.999, "(999 are needed)"), (0.5, "")):
        done = run("predict", model, folder / "new.csv", "-o", tmp_path / "out.csv", "--level", level)
        assert done.exit_code == 0, done.output
        assert words in done.stderr
        assert ("judging rows" in done.stderr) == bool(words)
        with (tmp_path / "out.csv").open(newline="") as file:
            ends = [(float(row["lower"]), float(row["upper"])) for row in csv.DictReader(file)]
        assert np.isfinite(ends).all()
    many = run("predict", folder / "house.dap", folder / "new.csv", "-o", tmp_path / "out.csv")
    assert "judging rows" not in many.stderr
