"""Every way in which a table, a model, an option or an output can be wrong: one line says so, nothing is written."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

import forks
from dapcal.cli import app
from dapcal.models import load
from dapcal.models.table import TableModel
from table_cases import SMALL, refused, run, write_rows


@pytest.fixture
def folder(houses: Path) -> Path:
    """train.csv, new.csv, and house.dap."""
    return houses


# Thirty kinds of wrong files, and wrong options


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


@pytest.mark.parametrize(
    ("command", "kind"),
    # `fit` and `predict` read in two ways; `report` and `explain` in the second, so that a few show that they do
    [
        *((command, kind) for command in ("fit", "predict") for kind in WRONG_FILES),
        *((command, kind) for command in ("report", "explain") for kind in list(WRONG_FILES)[::6]),
    ],
)
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
        (["--target", "price", "--posterior", "magic"], ("ensemble, tabm, laplace",)),
        (["--target", "price", "--hidden", "a,b"], ("64,64",)),
        (["--target", "price", "--hidden", "0"], ("hidden",)),
        (["--target", "price", "--validation", "2"], ("between 0 and 1",)),
        (["--target", "id"], ("single row",)),
    ],
)
def test_wrong_options_of_fit(arguments: list[str], words: tuple[str, ...], folder: Path, tmp_path: Path):
    refused(run("fit", folder / "train.csv", *arguments, "-o", tmp_path / "m.dap"), *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "rooms"], ("--target was given 2 times", "fit a model for each, with --drop for the others")),
        (["--target=rooms", "--target", "city"], ("--target was given 3 times",)),
        (["--out", "b.dap"], ("--out was given 2 times; give it once",)),
        (["--seed", "1", "--seed", "1"], ("--seed was given 2 times",)),
        (["--log", "--no-log"], ("--log was given 2 times",)),
    ],
)
def test_an_option_that_takes_one_value_is_given_once(
    arguments: list[str], words: tuple[str, ...], folder: Path, tmp_path: Path
):
    train = folder / "train.csv"
    result = run("fit", train, "--target", "price", "-o", tmp_path / "out.dap", *arguments, "--fast", "--quiet", "-q")
    refused(result, *words)
    assert not list(tmp_path.iterdir())
    asked = run("fit", train, "--target", "price", "-o", tmp_path / "out.dap", *arguments, "--json")
    assert words[0] in json.loads(asked.stdout)["error"]


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
    arguments = ["fit", tmp_path / "train.csv", "--target", "price", "-o", tmp_path / "m.dap", *SMALL, "--fast"]
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
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dapcal.container.write", full)
    result = run("fit", folder / "train.csv", "--target", "price", "-o", tmp_path / "m.dap", *SMALL, "--fast")
    refused(result, "Could not write", "Check free space", code=1)
    assert not list(tmp_path.iterdir())


def test_a_reader_that_has_seen_enough_is_no_error(folder: Path):
    with forks.forked(forks.command("explain", folder / "house.dap", folder / "new.csv")) as process:
        process.stdout.close()
        assert process.ended() == 1
        assert process.stderr.read().strip() == ""


def test_an_error_half_way_leaves_no_output(folder: Path, tmp_path: Path):
    rows = "".join(f"{80 + i % 7},2,Rome\n" for i in range(20_000))
    (tmp_path / "long.csv").write_text("area,rooms,city\n" + rows + "oops,2,Rome\n")
    refused(run("predict", folder / "house.dap", tmp_path / "long.csv", "-o", tmp_path / "o.csv"), "20001", "`area`")
    assert [path.name for path in tmp_path.iterdir()] == ["long.csv"]


def test_an_error_is_json_too_where_json_was_asked_for(folder: Path, tmp_path: Path):
    result = run("predict", folder / "house.dap", tmp_path / "nowhere.csv", "-o", tmp_path / "o.csv", "--json")
    assert result.exit_code == 2
    assert "nowhere.csv" in json.loads(result.stdout)["error"]


def test_a_stopped_prediction_leaves_no_output(folder: Path, tmp_path: Path):
    """By SIGTERM; test_experiments.py has SIGINT, which ends a command in the same way."""
    (tmp_path / "long.csv").write_text("area,rooms,city\n" + "80,2,Rome\n" * 400_000)
    program = forks.command("predict", folder / "house.dap", tmp_path / "long.csv", "-o", tmp_path / "o.csv")
    with forks.forked(program) as process:
        started = time.monotonic()
        while not list(tmp_path.glob(".*.part")):
            assert time.monotonic() - started < 120
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGTERM)
        assert process.ended() == 143
        assert "Traceback" not in process.stderr.read()
    assert [path.name for path in tmp_path.iterdir()] == ["long.csv"]


def unclosed(path: Path) -> Path:
    """A thousand rows, compressed; in row 400 a quotation begins and never ends."""
    write_rows(path.with_suffix(""), 1000)
    lines = path.with_suffix("").read_text().splitlines()
    lines[400] = ",".join([*lines[400].split(",")[:-1], '"' + lines[400].split(",")[-1]])
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode()))
    path.with_suffix("").unlink()
    return path


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
