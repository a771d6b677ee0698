"""`dapcal fit`, `predict`, `report`, `explain` and `doctor` as people call them, and every way a file can be wrong."""

from __future__ import annotations

import csv
import errno
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import Result
from safetensors import SafetensorError
from safetensors.torch import save_file
from typer.testing import CliRunner

import dapcal
from dapcal.cli import app
from dapcal.models import load
from dapcal.models.table import TableModel

SMALL = ["--epochs", "4", "--hidden", "8"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(result: Result, *words: str, code: int = 2) -> None:
    """One line that says what is wrong, an exit code, and no traceback."""
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit), "an error that nobody caught"
    lines = [line for line in result.stderr.splitlines() if line.strip() and "━" not in line and "note:" not in line]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.output
    for word in words:
        assert word in lines[0], lines[0]


def write_rows(path: Path, n: int = 160, seed: int = 0, target: bool = True) -> Path:
    random = np.random.default_rng(seed)
    area, rooms = random.normal(80, 20, n), random.integers(1, 6, n)
    city = random.choice(["Rome", "Oslo"], n)
    price = 3 * area + 10 * rooms + 40 * (city == "Rome") + random.normal(0, 5, n)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "area", "rooms", "city", *(["price"] if target else [])])
        for i in range(n):
            row = [f"h{i}", f"{area[i]:.3f}", rooms[i] if i % 11 else "", city[i]]
            writer.writerow([*row, *([f"{price[i]:.2f}"] if target else [])])
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.csv, new.csv, and house.dap as `dapcal fit` writes it."""
    folder = tmp_path_factory.mktemp("tables")
    write_rows(folder / "train.csv", 220)
    write_rows(folder / "new.csv", 30, seed=1, target=False)
    result = run("fit", folder / "train.csv", "--target", "price", "-o", folder / "house.dap", *SMALL)
    assert result.exit_code == 0, result.output
    return folder


def unclosed(path: Path) -> Path:
    """A thousand rows, compressed; in row 400 a quotation begins and never ends."""
    write_rows(path.with_suffix(""), 1000)
    lines = path.with_suffix("").read_text().splitlines()
    lines[400] = ",".join([*lines[400].split(",")[:-1], '"' + lines[400].split(",")[-1]])
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode()))
    path.with_suffix("").unlink()
    return path


# What works


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
    assert result.stderr == ""


def test_quiet_says_nothing(folder: Path, tmp_path: Path):
    result = run("fit", folder / "train.csv", "--target", "price", "-o", tmp_path / "m.dap", *SMALL, "--quiet")
    assert result.exit_code == 0
    assert result.output == ""


@pytest.mark.parametrize("posterior", ["laplace", "variational", "swag", "dropout"])
def test_every_posterior_can_be_asked_for(posterior: str, folder: Path, tmp_path: Path):
    arguments = ["--target", "city", "--posterior", posterior, "-o", tmp_path / "m.dap", *SMALL]
    result = run("fit", folder / "train.csv", *arguments, "--seed", "1", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["task"] == "classification"
    assert load(tmp_path / "m.dap").recipe.posterior == posterior
    assert load(tmp_path / "m.dap").recipe.seed == 1


def test_too_few_rows_to_flag_any_are_told(tmp_path: Path):
    write_rows(tmp_path / "few.csv", 40)
    result = run("fit", tmp_path / "few.csv", "--target", "price", "-o", tmp_path / "m.dap", *SMALL)
    assert "or more, so nothing can be flagged at 0.05" in result.stderr
    arguments = ["predict", tmp_path / "m.dap", tmp_path / "few.csv", "-o", tmp_path / "o.csv", "--alpha"]
    assert "nothing can be flagged at 0.01" in run(*arguments, "0.01").stderr
    assert "nothing can be flagged" not in run(*arguments, "0.2").stderr


def test_options_of_fit_are_heeded(folder: Path, tmp_path: Path):
    arguments = ["--target", "rooms", "--task", "regression", "--drop", "city", "--drop", "id", "--validation", "0.5"]
    result = run("fit", folder / "train.csv", *arguments, "-o", tmp_path / "m.dap", *SMALL)
    assert result.exit_code == 0, result.output
    model = load(tmp_path / "m.dap")
    assert model.task == "regression"
    assert [column.name for column in model.encoder.columns] == ["area", "price"]
    assert len(model.train.x) == pytest.approx(len(model.held_out.x), abs=2)
    assert model.recipe.hidden == (8,)
    arguments = ["--target", "price", "--category", "rooms", "-o", tmp_path / "c.dap", *SMALL]
    assert run("fit", folder / "train.csv", *arguments).exit_code == 0
    assert load(tmp_path / "c.dap").encoder.expected["rooms"] == "category"


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
    arguments = ["--target", "city", "--drop", "price", "-o", tmp_path / "m.dap", *SMALL, "-q"]
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


# What is refused: thirty kinds of wrong files, and wrong options


def _bytes(content: bytes, name: str = "bad.csv") -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        (place / name).write_bytes(content)
        return place / name

    return make


def _parquet(table: pa.Table, cut: int | None = None) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        pq.write_table(table, place / "bad.parquet")
        if cut is not None:
            (place / "bad.parquet").write_bytes((place / "bad.parquet").read_bytes()[:-cut])
        return place / "bad.parquet"

    return make


def _npz(**arrays: np.ndarray) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        np.savez(place / "bad.npz", **arrays)
        return place / "bad.npz"

    return make


def _folder(place: Path) -> Path:
    (place / "bad.csv").mkdir()
    return place / "bad.csv"


def _locked(place: Path) -> Path:
    path = write_rows(place / "bad.csv")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    return path


def _loop(place: Path) -> Path:
    (place / "bad.csv").symlink_to(place / "bad.csv")
    return place / "bad.csv"


HEAD = b"id,area,rooms,city,price\n"
LINE = b"a,80.5,2,Rome,300\n"
WRONG_FILES: dict[str, Callable[[Path], Path]] = {
    "missing": lambda place: place / "nowhere.csv",
    "a folder": _folder,
    "no permission": _locked,
    "a link to itself": _loop,
    "empty": _bytes(b""),
    "white space alone": _bytes(b"\n\n  \n"),
    "a header alone": _bytes(HEAD),
    "binary": _bytes(bytes(range(256)) * 8),
    "NUL bytes": _bytes(HEAD + LINE + b"b,80\0.5,2,Rome,300\n"),
    "ragged, too few": _bytes(HEAD + LINE + b"b,80.5,2\n"),
    "ragged, too many": _bytes(HEAD + LINE + b"b,80.5,2,Rome,300,7,8\n"),
    "other columns": _bytes(b"x,y\n1,2\n3,4\n"),
    "one column missing": _bytes(b"area,rooms\n80,2\n"),
    "duplicate header": _bytes(b"id,area,area,rooms,city,price\na,1,2,3,Rome,4\n"),
    "unnamed column": _bytes(b"id,,rooms,city,price\na,1,3,Rome,4\n"),
    "infinity": _bytes(HEAD + LINE + b"b,inf,2,Rome,300\n"),
    "minus infinity": _bytes(HEAD + LINE + b"b,-Infinity,2,Rome,300\n"),
    "a text for a number": _bytes(HEAD + LINE * 30 + b"b,about eighty,2,Rome,300\n"),
    "a huge integer": _bytes(HEAD + LINE + b"b," + b"9" * 400 + b",2,Rome,300\n"),
    "a decimal comma": _bytes(b'id;area;rooms;city;price\na;"80,5";2;Rome;300\n'),
    "latin-1": _bytes(HEAD + "b,80.5,2,Málaga,300\n".encode("latin-1")),
    "UTF-16": _bytes((HEAD + LINE).decode().encode("utf-16")),
    "unclosed quote": _bytes(HEAD + LINE + b'b,80.5,2,"Rome,300\n'),
    "an unknown suffix": _bytes(HEAD + LINE, "bad.xlsx"),
    "Excel called CSV": _bytes(b"PK\x03\x04" + bytes(200)),
    "Parquet called CSV": _bytes(b"PAR1" + bytes(200) + b"PAR1"),
    "CSV called Parquet": _bytes(HEAD + LINE, "bad.parquet"),
    "empty Parquet": _bytes(b"", "bad.parquet"),
    "truncated Parquet": _parquet(pa.table({"area": [1.0] * 100}), cut=20),
    "nested Parquet": _parquet(pa.table({"area": [[1.0]], "rooms": [1], "city": ["Rome"], "price": [3.0]})),
    "no gzip": _bytes(HEAD + LINE, "bad.csv.gz"),
    "truncated gzip": _bytes(gzip.compress(HEAD + LINE * 500)[:-30], "bad.csv.gz"),
    "empty npz": _bytes(b"", "bad.npz"),
    "npz of unequal lengths": _npz(area=np.ones(3), rooms=np.ones(2)),
    "npz of objects": _npz(area=np.array([{}, 1], dtype=object)),
    "npz of three dimensions": _npz(x=np.ones((2, 3, 4))),
}


@pytest.mark.parametrize("kind", WRONG_FILES)
@pytest.mark.parametrize("command", ["fit", "predict", "report", "explain"])
def test_a_wrong_table_gives_one_line_and_no_output(command: str, kind: str, folder: Path, tmp_path: Path):
    bad, out = WRONG_FILES[kind](tmp_path), tmp_path / "out.csv"
    before = sorted(path.name for path in tmp_path.iterdir())
    arguments: dict[str, list[object]] = {
        "fit": ["fit", bad, "--target", "price", "-o", out, *SMALL],
        "predict": ["predict", folder / "house.dap", bad, "-o", out],
        "report": ["report", folder / "house.dap", "--data", bad, "-o", out],
        "explain": ["explain", folder / "house.dap", bad],
    }
    refused(run(*arguments[command]))
    assert sorted(path.name for path in tmp_path.iterdir()) == before, "something was left behind"


WRONG_MODELS: dict[str, Callable[[Path], Path]] = {
    "missing": lambda place: place / "nowhere.dap",
    "a folder": _folder,
    "empty": _bytes(b"", "bad.dap"),
    "text": _bytes(b"hello", "bad.dap"),
    "binary": _bytes(bytes(range(256)) * 50, "bad.dap"),
    "zip": _bytes(b"PK\x03\x04" + bytes(200), "bad.dap"),
}


def _other_safetensors(place: Path) -> Path:
    save_file({"w": torch.zeros(2)}, place / "bad.dap")
    return place / "bad.dap"


def _changed(folder: Path, place: Path) -> Path:
    content = bytearray((folder / "house.dap").read_bytes())
    content[-5] ^= 1
    (place / "bad.dap").write_bytes(content)
    return place / "bad.dap"


def _cut(folder: Path, place: Path) -> Path:
    (place / "bad.dap").write_bytes((folder / "house.dap").read_bytes()[:-100])
    return place / "bad.dap"


@pytest.mark.parametrize("kind", [*WRONG_MODELS, "another safetensors file", "changed", "truncated", "no table's"])
def test_a_wrong_model_gives_one_line_and_no_output(kind: str, folder: Path, tmp_path: Path):
    if kind in WRONG_MODELS:
        bad = WRONG_MODELS[kind](tmp_path)
    elif kind == "another safetensors file":
        bad = _other_safetensors(tmp_path)
    elif kind == "no table's":
        bad = tmp_path / "bad.dap"
        load(folder / "house.dap").calibrated.save(bad)
    else:
        bad = (_changed if kind == "changed" else _cut)(folder, tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    refused(run("predict", bad, folder / "new.csv", "-o", tmp_path / "out.csv"))
    refused(run("report", bad, "-o", tmp_path / "out.html"))
    refused(run("explain", bad, folder / "new.csv"))
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "prise"], ("no column `prise`", "did you mean `price`")),
        (["--target", "PRICE"], ("no column `PRICE`", "did you mean `price`")),
        (["--target", "price", "--category", "room"], ("has no column `room`", "did you mean `rooms`")),
        (["--target", "price", "--drop", "price"], ("is the target",)),
        (["--target", "price", "--drop", "nothing"], ("no column `nothing`",)),
        (["--target", "price", "--task", "ranking"], ("classification or regression",)),
        (["--target", "city", "--task", "regression"], ("Expected numbers", "--task classification")),
        (["--target", "price", "--posterior", "magic"], ("ensemble, laplace",)),
        (["--target", "price", "--hidden", "a,b"], ("64,64",)),
        (["--target", "price", "--hidden", "0"], ("hidden",)),
        (["--target", "price", "--validation", "2"], ("between 0 and 1",)),
        (["--target", "id"], ("single row",)),
    ],
)
def test_wrong_options_of_fit(arguments: list[str], words: tuple[str, ...], folder: Path, tmp_path: Path):
    refused(run("fit", folder / "train.csv", *arguments, "-o", tmp_path / "m.dap"), *words)
    assert not list(tmp_path.iterdir())


def test_files_are_opened_by_us_and_not_by_the_parser():
    """Which would take seven lines to say that one may not be read; as root, who may read all, no other test sees."""
    checked = 0
    for command in app.registered_commands:
        if command.callback.__name__ in ("demo", "reproduce"):  # they read no files
            continue
        for hint in get_type_hints(command.callback, include_extras=True).values():
            if "Path" in str(get_args(hint)[:1]):
                assert get_args(hint)[1].readable is False, command.callback
                checked += 1
    assert checked >= 18


def test_a_device_that_is_not_there(folder: Path, tmp_path: Path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    arguments = ["fit", folder / "train.csv", "--target", "price", "-o", tmp_path / "m.dap", "--device", "cuda"]
    refused(run(*arguments), code=2)
    refused(run(*arguments[:-1], "abacus"), "abacus", code=2)


@pytest.mark.parametrize("what", ["folder", "missing folder", "input", "model", "suffix"])
def test_wrong_outputs(what: str, folder: Path, tmp_path: Path):
    model, new = tmp_path / "m.dap", tmp_path / "new.csv"
    shutil.copy(folder / "house.dap", model)
    shutil.copy(folder / "new.csv", new)
    out = {
        "folder": tmp_path,
        "missing folder": tmp_path / "a" / "b.csv",
        "input": new,
        "model": model,
        "suffix": tmp_path / "out.xlsx",
    }[what]
    refused(run("predict", model, new, "-o", out))
    assert new.read_bytes() == (folder / "new.csv").read_bytes()
    assert model.read_bytes() == (folder / "house.dap").read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_device_as_output_is_never_replaced(folder: Path, tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.csv")
    refused(run("predict", folder / "house.dap", folder / "new.csv", "-o", tmp_path / "pipe.csv"), "a device or a pipe")
    assert (tmp_path / "pipe.csv").is_fifo()


def test_two_kept_columns_never_get_one_name(folder: Path, tmp_path: Path):
    table = pa.table({"area": [80.0], "rooms": [2.0], "city": ["Rome"], "upper": [1], "input_upper": [2]})
    pq.write_table(table, tmp_path / "new.parquet")
    arguments = ["predict", folder / "house.dap", tmp_path / "new.parquet", "-o", tmp_path / "o.csv", "--keep", "upper"]
    refused(run(*arguments, "--keep", "input_upper"), "two columns of one name")
    assert run(*arguments).exit_code == 0
    assert (tmp_path / "o.csv").read_text().startswith("input_upper,prediction,lower,upper,")


def test_another_table_is_told_by_all_that_it_lacks(folder: Path, tmp_path: Path):
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    result = run("predict", folder / "house.dap", tmp_path / "other.csv", "-o", tmp_path / "o.csv")
    refused(result, "3 of the 3 columns that the model was fitted on are missing: area, rooms, city", "has: a, b")


def test_a_broken_column_can_be_dropped(folder: Path, tmp_path: Path):
    (tmp_path / "train.csv").write_text((folder / "train.csv").read_text().replace("h0,", "h0,about "))
    arguments = ["fit", tmp_path / "train.csv", "--target", "price", "-o", tmp_path / "m.dap", *SMALL]
    refused(run(*arguments), "row 1: column `area` holds 'about ")
    assert run(*arguments, "--drop", "area").exit_code == 0


def test_no_room_is_said_without_error_numbers(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    result = run("predict", folder / "house.dap", folder / "new.csv", "-o", tmp_path / "o.csv")
    refused(result, "No space left on device; make room, or name another place", code=1)
    assert "Errno" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_no_room_for_a_model_is_no_wrong_argument(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("dapcal.artifact.save_file", full)
    result = run("fit", folder / "train.csv", "--target", "price", "-o", tmp_path / "m.dap", *SMALL)
    refused(result, "Could not write", "Check free space", code=1)
    assert not list(tmp_path.iterdir())


def test_a_reader_that_has_seen_enough_is_no_error(folder: Path):
    command = ["explain", str(folder / "house.dap"), str(folder / "new.csv")]
    code = "from dapcal.cli import main; main()"
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run([sys.executable, "-c", code, *command], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert process.returncode == 1
    assert process.stderr.strip() == ""


def test_an_error_half_way_leaves_no_output(folder: Path, tmp_path: Path):
    rows = "".join(f"{80 + i % 7},2,Rome\n" for i in range(20_000))
    (tmp_path / "long.csv").write_text("area,rooms,city\n" + rows + "oops,2,Rome\n")
    refused(run("predict", folder / "house.dap", tmp_path / "long.csv", "-o", tmp_path / "o.csv"), "20001", "`area`")
    assert [path.name for path in tmp_path.iterdir()] == ["long.csv"]


def test_an_error_is_json_too_where_json_was_asked_for(folder: Path, tmp_path: Path):
    result = run("predict", folder / "house.dap", tmp_path / "nowhere.csv", "-o", tmp_path / "o.csv", "--json")
    assert result.exit_code == 2
    assert "nowhere.csv" in json.loads(result.stdout)["error"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_prediction_leaves_no_output(number: signal.Signals, folder: Path, tmp_path: Path):
    (tmp_path / "long.csv").write_text("area,rooms,city\n" + "80,2,Rome\n" * 400_000)
    command = ["predict", str(folder / "house.dap"), str(tmp_path / "long.csv"), "-o", str(tmp_path / "o.csv")]
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from dapcal.cli import main; main()"
    )
    process = subprocess.Popen([sys.executable, "-c", code, *command], stderr=subprocess.PIPE, text=True)
    started = time.monotonic()
    while not list(tmp_path.glob(".*.part")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() - started < 120
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["long.csv"]


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


def test_an_unclosed_quotation_in_a_compressed_table_loses_no_rows(folder: Path, tmp_path: Path):
    table = unclosed(tmp_path / "t.csv.gz")
    refused(run("fit", table, "--target", "price", "-o", tmp_path / "m.dap", *SMALL), "row 400", "quotation")
    refused(run("predict", folder / "house.dap", table, "-o", tmp_path / "out.csv"), "row 400", "quotation")
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv.gz"]


def test_a_prediction_that_lost_rows_is_never_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    honest = TableModel.columns

    def lossy(*arguments: object, **named: object) -> dict[str, np.ndarray]:
        return {name: values[1:] for name, values in honest(*arguments, **named).items()}

    monkeypatch.setattr(TableModel, "columns", lossy)
    result = run("predict", folder / "house.dap", folder / "new.csv", "-o", tmp_path / "out.csv")
    refused(result, "30 rows of", "were read and 29 written", code=1)
    assert not list(tmp_path.iterdir())
