"""Excel files and standard input, by the rules of CSV files."""

from __future__ import annotations

import datetime
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dapcal.cli import app
from dapcal.tables import columns_of, read
from dapcal.types import DapcalWarning
from table_cases import SMALL, write_rows

openpyxl = pytest.importorskip("openpyxl")


def workbook(path: Path, *lines: list, sheets: int = 1) -> Path:
    book = openpyxl.Workbook()
    for line in lines:
        book.active.append(line)
    for _ in range(sheets - 1):
        book.create_sheet()
    book.save(path)
    return path


def test_a_sheet_is_read_as_a_csv_file_would_be(tmp_path):
    lines = [
        ["area", "sold", "city", "new"],
        [80.5, datetime.date(2024, 12, 31), "Rome", True],
        [None, None, "Oslo", False],
    ]
    path = workbook(tmp_path / "a.xlsx", *lines, [], [70, datetime.datetime(2024, 1, 2), "NA", None])
    text = "area,sold,city,new\n80.5,2024-12-31,Rome,true\n,,Oslo,false\n70,2024-01-02,NA,\n"
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    assert read(path).equals(read(tmp_path / "a.csv"))
    assert columns_of(path) == ("area", "sold", "city", "new")


def test_what_is_wrong_with_a_workbook_is_said(tmp_path):
    with pytest.warns(DapcalWarning, match="has 2 sheets; the first, 'Sheet', is read"):
        read(workbook(tmp_path / "two.xlsx", ["a"], [1], sheets=2))
    with pytest.raises(ValueError, match="has a header and no rows"):
        read(workbook(tmp_path / "head.xlsx", ["a", "b"]))
    with pytest.raises(ValueError, match="row 1: values beyond the 1 columns"):
        read(workbook(tmp_path / "wide.xlsx", ["a"], [1, 2]))
    (tmp_path / "text.xlsx").write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(ValueError, match="is not an Excel file"):
        read(tmp_path / "text.xlsx")
    with zipfile.ZipFile(tmp_path / "zip.xlsx", "w") as archive:
        archive.writestr("a.txt", "nothing")
    with pytest.raises(ValueError, match="is not an Excel workbook that can be read"):
        read(tmp_path / "zip.xlsx")


def test_standard_input_is_a_table(tmp_path):
    content = write_rows(tmp_path / "train.csv", 60).read_bytes()
    runner, model, out = CliRunner(), str(tmp_path / "m.dap"), tmp_path / "out.csv"
    result = runner.invoke(app, ["fit", "-", "--target", "price", "-o", model, "--fast", *SMALL], input=content)
    assert result.exit_code == 0, result.output
    result = runner.invoke(app, ["predict", model, "-", "-o", str(out)], input=content)
    assert result.exit_code == 0, result.output
    assert len(out.read_text(encoding="utf-8").splitlines()) == 61
    result = runner.invoke(app, ["predict", model, "-", "-o", str(out)], input=b"")
    assert result.exit_code == 2
    assert "Standard input (-) is empty" in result.stderr
