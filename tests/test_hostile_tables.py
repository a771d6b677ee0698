"""Tables of others: formulas in labels, control characters in names, huge fields, very many columns."""

from __future__ import annotations

import csv
import gzip
import json
import re
import resource
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

import previous_cases
from dapcal import npz, tables
from dapcal.cli import app
from dapcal.cli.common import output
from dapcal.cli.predict_blocks import predicted_in_blocks
from dapcal.models import load, table_fitting, writing
from dapcal.models.formulas import Formulas
from dapcal.models.model import PLAIN
from dapcal.recipes import Recipe
from dapcal.tables.encoder import fit_encoder
from dapcal.tables.sources import MOST_COLUMNS
from dapcal.visible import in_json, one_line, shown

ESCAPE = "\x1b[2J"
FORMULA = '=HYPERLINK("http://x")'


def run(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Path:
    """A folder with a table whose names and labels were written by somebody else, and a model of it."""
    folder = tmp_path_factory.mktemp("hostile")
    random = np.random.default_rng(0)
    x = random.normal(size=120)
    table = pa.table(
        {
            f"area{ESCAPE}": x,
            "city\x9b31m\u202e": random.choice(["Rome", f"Oslo{ESCAPE}"], 120),
            "@id": [f"+{i}" if i % 2 else f"-id{i}" for i in range(120)],
            "target": np.where(x + 0.3 * random.normal(size=120) > 0, FORMULA, f"no{ESCAPE}"),
        }
    )
    recipe = Recipe(hidden=(4,), members=2, epochs=80, fast=True)
    table_fitting.fit(table, "target", recipe=recipe, drop=["@id"]).save(folder / "m.dap")
    pyarrow.parquet.write_table(table, folder / "new.parquet")
    return folder


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_formulas_are_noted_and_escaped_on_request(hostile, tmp_path):
    out = tmp_path / "out.csv"
    words = ["predict", hostile / "m.dap", hostile / "new.parquet", "-o", out, "--keep", "@id", "--json"]
    plain = run(*words)
    assert plain.exit_code == 0, plain.output
    before = rows_of(out)
    assert any("--excel-safe makes them harmless" in note for note in json.loads(plain.stdout)["notes"])
    safe = run(*words, "--excel-safe")
    assert safe.exit_code == 0, safe.output
    after = rows_of(out)
    assert {row["prediction"] for row in before} == {FORMULA, f"no{ESCAPE}"}
    assert {row["prediction"] for row in after} == {f"'{FORMULA}", f"no{ESCAPE}"}
    assert [row["'@id"] for row in after] == [f"+{i}" if i % 2 else f"'-id{i}" for i in range(120)]  # numbers stay
    escaped = 1 + 60 + sum(row["prediction"] == FORMULA for row in before)
    notes = json.loads(safe.stdout)["notes"]
    assert any(note.startswith(f"{escaped} texts that a spreadsheet would run") for note in notes)


@pytest.fixture(scope="module")
def formula_column(tmp_path_factory) -> Path:
    """A folder with a model that has a column called as a formula is spelt, and rows without a value in it."""
    folder = tmp_path_factory.mktemp("formula")
    random = np.random.default_rng(0)
    x = random.normal(size=(120, 2))
    table = pa.table({"=1+1": x[:, 0], "area": x[:, 1], "target": x.sum(1) + 0.1 * random.normal(size=120)})
    recipe = Recipe(hidden=(4,), members=2, epochs=5, fast=True)
    table_fitting.fit(table, "target", recipe=recipe).save(folder / "m.dap")
    (folder / "new.csv").write_text("=1+1,area\n,0.1\n0.2,0.3\n")
    return folder


def in_blocks(folder: Path, out: Path, *, excel_safe: bool) -> list[str]:
    """Notes of `dapcal predict --engine`, here with the engine of one machine."""
    with output(as_json=False, quiet=True) as said:
        about = {"engine_name": "local", "address": None, "brought": {}}
        model = load(folder / "m.dap")
        predicted_in_blocks(
            model, folder / "m.dap", folder / "new.csv", PLAIN, out, 1.0, 0.95, said, excel_safe, **about
        )
    return said.notes


def on_one_machine(folder: Path, out: Path, *, excel_safe: bool) -> list[str]:
    words = ["predict", folder / "m.dap", folder / "new.csv", "-o", out, "--alpha", 1, "--json"]
    done = run(*words, *["--excel-safe"] * excel_safe)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["notes"]


@pytest.mark.parametrize("notes_of", [on_one_machine, in_blocks])
def test_names_of_columns_in_cells_are_noted_and_escaped_as_all_texts(formula_column, tmp_path, notes_of):
    """They stood in `missing` and `unusual` as they are, without a note."""
    out = tmp_path / "out.csv"
    notes = notes_of(formula_column, out, excel_safe=False)
    first = rows_of(out)[0]
    assert first["missing"] == "=1+1"
    assert first["unusual"].startswith("=1+1: missing")
    found = sum(row[name].startswith("=1+1") for row in rows_of(out) for name in ("missing", "unusual"))
    assert any(note.startswith(f"{found} texts begin as a formula does") for note in notes)
    notes = notes_of(formula_column, out, excel_safe=True)
    first = rows_of(out)[0]
    assert first["missing"] == "'=1+1"
    assert first["unusual"].startswith("'=1+1: missing")
    assert not any(text.startswith("=") for row in rows_of(out) for text in row.values())
    assert any(note.startswith(f"{found} texts that a spreadsheet would run") for note in notes)


def test_texts_of_a_network_are_noted_and_escaped(tmp_path):
    formulas = Formulas(escape=True)
    columns = {
        "prediction": np.array(["=a", "b"], object),
        "probability": np.ones((2, 2)),
        "reason": np.array(["", "-c"]),
    }
    with writing.writer(tmp_path / "out.csv", ("=a", "b"), formulas) as write:
        write({"@file": np.array(["+x", "y"])}, columns)
    (first, second) = rows_of(tmp_path / "out.csv")
    assert list(first) == ["'@file", "prediction", "probability_=a", "probability_b", "reason"]
    assert [first["'@file"], first["prediction"], second["reason"]] == ["'+x", "'=a", "'-c"]
    assert formulas.found == 4


def test_what_is_not_for_spreadsheets_is_not_escaped(hostile, tmp_path):
    out = tmp_path / "out.parquet"
    result = run("predict", hostile / "m.dap", hostile / "new.parquet", "-o", out, "--excel-safe")
    assert result.exit_code == 2
    assert "--excel-safe is for .csv and .tsv files" in result.output
    assert not out.exists()


@pytest.mark.parametrize("text", ["=1", "+a", "-a", "@a", "\ta", "\ra", "＝1"])
def test_what_begins_as_a_formula(text):
    formulas = Formulas(escape=True)
    found = formulas.values({"a": pa.array([text, "a=1", "-1.5e3", None, ""]), "n": pa.array([-1.0])})
    assert found["a"].to_pylist() == [f"'{text}", "a=1", "-1.5e3", None, ""]
    assert found["n"].to_pylist() == [-1.0]
    assert formulas.values({"a": np.array([text, "b"], object)})["a"].tolist() == [f"'{text}", "b"]
    assert formulas.found == 2


def test_two_names_do_not_become_one():
    with pytest.raises(ValueError, match="two columns of one name"):
        Formulas(escape=True).names({"=a": 1, "'=a": 2})


CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["words", "json"])
def test_control_characters_never_reach_the_terminal(hostile, tmp_path, as_json):
    new, model = hostile / "new.parquet", hostile / "m.dap"
    small = ["--fast", "--epochs", 1, "--hidden", 4]
    missing = tmp_path / f"missing{ESCAPE}.csv"
    commands = [
        ["fit", new, "--target", "target", "-o", tmp_path / f"m{ESCAPE}.dap", *small],
        ["predict", model, new, "-o", tmp_path / f"out{ESCAPE}.csv"],
        ["predict", model, new, "-o", tmp_path / "out.csv", "--keep", ESCAPE],
        ["predict", model, missing, "-o", tmp_path / "out.csv"],
        ["predict", model, tmp_path / "\udc80.csv", "-o", tmp_path / "out.csv"],  # a name that is not UTF-8
        ["explain", model, new],
        ["report", model, "-o", tmp_path / f"r{ESCAPE}.html"],
    ]
    codes = Counter()
    for command in commands:
        result = run(*command, *as_json)
        codes[result.exit_code] += 1
        assert not CONTROL.search(result.output), (command[0], result.output)
        assert result.exception is None or isinstance(result.exception, SystemExit), command
        if as_json:
            json.loads(result.stdout.strip().splitlines()[-1])
    assert codes == {0: 4, 2: 3}


def test_control_characters_are_shown_and_kept_by_json():
    text = "a\x1b\x7f\x9b\u202e\udc80\tb\n"
    assert shown(text) == "a\\x1b\\x7f\\x9b\\u202e\\udc80\tb\n"
    assert one_line(" a \x85 b\n\x1b") == "a b \\x1b"
    assert json.loads(in_json(json.dumps([text], ensure_ascii=False))) == [text]


def limited_growth(action) -> float:
    """MiB that the process grew by."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    action()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def test_a_line_without_an_end_is_not_read_as_a_whole(tmp_path):
    """200 MB of one field, in a file of 200 kB: once four strings of 200 MB, now a piece of it."""
    with gzip.open(tmp_path / "a.csv.gz", "wb", compresslevel=1) as file:
        for _ in range(100):
            file.write(b"a" * 2_000_000)

    def refused() -> None:
        with pytest.raises(ValueError, match=r"more than 4 MiB in line 1"):
            tables.read(tmp_path / "a.csv.gz")

    assert limited_growth(refused) < 100


def test_a_huge_value_of_a_parquet_file_is_not_read(tmp_path):
    table = pa.table({"a": ["x" * 20_000_000, "y"], "b": [1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    del table
    with pytest.raises(ValueError, match=r"column `a` takes 19 MiB for 2 values; write the file without it"):
        tables.read(tmp_path / "a.parquet")


def test_very_many_columns_are_refused(tmp_path):
    many = MOST_COLUMNS + 1
    text = f"{','.join(f'c{i}' for i in range(many))}\n{','.join('1' * many)}\n"
    (tmp_path / "a.csv").write_text(text)
    np.savez(tmp_path / "a.npz", x=np.zeros((1, many)))
    for name in ("a.csv", "a.npz"):
        with pytest.raises(ValueError, match=rf"{name} has 20,001 columns, and a table may have 20,000"):
            tables.read(tmp_path / name)


LONG = 100_000 * "a"


@pytest.mark.parametrize(
    ("header", "row", "words"),
    [
        (f"area,city,{LONG}", "1,Rome,2", ["predict", "--keep", "other"]),
        (LONG, "1", ["predict"]),
        (f"area,target,{LONG}", "1,2,3", ["fit", "--target", "other"]),
        (f"area,target,{LONG}", "1,2,3", ["fit", "--target", f"{LONG}b"]),
        (f"{LONG},{LONG},target", "1,2,3", ["fit", "--target", "target"]),
        ("area,target", f"1,{LONG}", ["fit", "--target", "target"]),
        (",".join(f"{name}{LONG[:300]}" for name in "abcdefghijklm"), ",".join(13 * "1"), ["predict"]),
    ],
    ids=["kept", "missing", "target", "nearly a name", "twice", "label", "many"],
)
def test_errors_quote_the_beginning_of_names_and_labels(tmp_path: Path, header: str, row: str, words: list[str]):
    (tmp_path / "new.csv").write_text("\n".join([header, *60 * [row]]) + "\n")
    model = [previous_cases.FOLDER / "table-regression.dap"] if words[0] == "predict" else []
    done = run(words[0], *model, tmp_path / "new.csv", *words[1:], "-o", tmp_path / "out.csv", "--json")
    assert done.exit_code == 2, done.output
    error = json.loads(done.stdout.splitlines()[-1])["error"]
    assert len(error) < 1200
    assert "aaa" in error


@pytest.mark.parametrize("between", ["", " "])
def test_what_fit_and_explain_print_has_the_beginning_of_names(tmp_path: Path, between: str):
    """One of 100,000 letters filled the screen, of a column, of the target and of a category."""
    random, long = np.random.default_rng(0), between.join(LONG)
    table = {f"{name}{long}": random.normal(size=80) for name in "xz"}
    table |= {f"city{long}": random.choice([f"Rome{long}", f"Oslo{long}"], 80)}
    table[f"y{long}"] = table[f"x{long}"] > random.normal(size=80)
    path, model = tmp_path / "train.parquet", tmp_path / "m.dap"
    pa.parquet.write_table(pa.table(table), path)
    fitted = run("fit", path, "--target", f"y{long}", "-o", model, "--epochs", "2", "--hidden", "8", "--fast")
    assert fitted.exit_code == 0, fitted.output[:1000]
    explained = run("explain", model, path)
    assert explained.exit_code == 0, explained.output[:1000]
    beginning = {name: f"{f'{name}{long}'[:60]}…" for name in ("x", "y", "Rome")}
    assert all(beginning[name] in fitted.stdout for name in "xy")
    assert all(text in explained.stdout for text in beginning.values())
    assert max(len(fitted.stdout), len(explained.stdout)) < 5000


def test_names_of_files_are_never_cut():
    path = "/".join(255 * letter for letter in "abcdefgh")
    assert one_line(f"There is no file {path}; check it") == f"There is no file {path}; check it"


def test_what_zip_says_of_a_damaged_array_is_cut(tmp_path: Path):
    path = tmp_path / "new.npz"
    np.savez(path, x=np.zeros(300))
    content = path.read_bytes()
    start = content.index(b"x.npy") - 4  # the length of a name, which is compared with what the directory says
    path.write_bytes(content[:start] + (1000).to_bytes(2, "little") + content[start + 2 :])
    with pytest.raises(ValueError, match="damaged or incomplete") as refused:
        npz.array(path, "x")
    assert len(str(refused.value)) < 1000


class Asked:
    """A table that counts what it is asked for."""

    def __init__(self, table: pa.Table) -> None:
        self.table, self.counts = table, Counter()

    def __getattr__(self, name: str):
        self.counts[name] += 1
        return getattr(self.table, name)

    def __getitem__(self, name: str):
        return self.table[name]

    def __len__(self) -> int:
        return len(self.table)


def test_names_are_listed_once_whatever_their_number():
    """A list of all names for every column made the time of `predict` quadratic."""
    table = pa.table({f"c{i}": [float(i), 1.0, i + 2.0] for i in range(50)} | {"y": [1.0, 2.0, 3.0]})
    asked = Asked(table)
    assert fit_encoder(table, "y")(asked).x.shape == (3, 100)  # numbers, and whether they are missing
    assert asked.counts["column_names"] <= 3
