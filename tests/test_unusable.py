"""Columns that cannot be used: all of them at once, and left out on request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from table_cases import SMALL, refused, run


@pytest.fixture(scope="module")
def messy(tmp_path_factory) -> Path:
    """A column of amounts with commas, one of free text, and three that are fine."""
    path = tmp_path_factory.mktemp("messy") / "train.csv"
    random = np.random.default_rng(0)
    lines = ['id,area,"a,b",cost,story,price']
    for place in range(120):
        area, rooms = random.normal(80, 20), int(random.integers(1, 6))
        story = f"the {place} th house that was sold by him on the hill"
        lines.append(f'{place % 7},{area:.2f},{rooms},"{1000 + 37 * place:,}",{story},{3 * area + rooms:.2f}')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_all_problems_are_listed_at_once(messy, tmp_path):
    """Before: the first alone, and the next after it was mended."""
    result = run("fit", messy, "--target", "price", "-o", tmp_path / "m.dap", *SMALL)
    refused(
        result,
        "2 columns cannot be used: (1)",
        "`cost` holds numbers with commas",
        "(2) Column `story` holds free text",
    )
    refused(result, "--drop-unusable leaves all of them out")


def test_they_are_left_out_on_request_with_a_note(messy, tmp_path):
    result = run("fit", messy, "--target", "price", "-o", tmp_path / "m.dap", "--fast", "--drop-unusable", *SMALL)
    assert result.exit_code == 0, result.output
    assert "left out: " in result.stderr
    assert "`cost` holds numbers with commas" in result.stderr
    assert run("predict", tmp_path / "m.dap", messy, "-o", tmp_path / "out.csv").exit_code == 0


def test_several_columns_are_dropped_with_commas_between_them(messy, tmp_path):
    result = run("fit", messy, "--target", "price", "-o", tmp_path / "m.dap", "--fast", "--drop", "cost,story", *SMALL)
    assert result.exit_code == 0, result.output
    assert "3 columns" in result.stdout
    result = run("fit", messy, "--target", "price", "-o", tmp_path / "m.dap", "--drop", "cost, stroy", *SMALL, "--fast")
    refused(result, "There is no column `stroy`; did you mean `story`?")


def test_a_column_whose_name_holds_a_comma_is_one_column(messy, tmp_path):
    options = ["--drop", "a,b", "--drop-unusable", "--fast", *SMALL]
    result = run("fit", messy, "--target", "price", "-o", tmp_path / "m.dap", *options)
    assert "2 columns" in result.stdout


def test_several_targets_are_refused_with_a_word(messy, tmp_path):
    result = run("fit", messy, "--target", "price,area", "-o", tmp_path / "m.dap", *SMALL)
    refused(result, "Expected one column as --target, got 2 (price, area); fit a model for each")


def test_a_target_that_cannot_be_used_is_not_left_out(messy, tmp_path):
    result = run("fit", messy, "--target", "cost", "--drop-unusable", "-o", tmp_path / "m.dap", *SMALL, "--fast")
    refused(result, "`cost` holds numbers with commas")
