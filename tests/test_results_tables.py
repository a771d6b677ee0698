"""The committed results of tables: the page shows them, and they keep what is promised."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dapcal.experiments.page.table_accuracy import (
    BOOSTING,
    DEFAULT,
    OURS,
    chosen_without,
    mean_ranks,
    measured,
    methods_of,
    side_by_side,
    table_accuracy_page,
    tables_of,
    worse_than_boosting,
)

ROOT = Path(__file__).parent.parent
ROWS = json.loads((ROOT / "results" / "tables.json").read_text(encoding="utf-8"))["rows"]


def test_the_page_shows_the_result_file():
    text = (ROOT / "docs" / "tables.md").read_text(encoding="utf-8")
    assert table_accuracy_page(text, ROOT / "results") == text, "run `make page`"


@pytest.mark.parametrize("name", ["error", "nll"])
def test_the_default_has_the_best_mean_rank_or_is_within_its_error(name):
    methods = side_by_side(ROWS)
    mean, error = mean_ranks(ROWS, methods, name)
    ours = methods.index(OURS)
    assert mean[ours] <= mean.min() + error[ours]


@pytest.mark.parametrize("table", tables_of(ROWS))
def test_no_table_is_predicted_worse_than_by_boosting(table):
    difference, error, allowed = worse_than_boosting(ROWS, table)
    assert difference - 2 * error <= allowed


@pytest.mark.parametrize("table", [t for t in tables_of(ROWS) if any("ece" in r for r in ROWS if r["table"] == t)])
def test_no_table_is_worse_calibrated_than_by_boosting(table):
    """ECE at most boosting's, beyond two standard errors of the paired difference."""
    difference = measured(ROWS, table, OURS, "ece") - measured(ROWS, table, BOOSTING, "ece")
    assert len(difference) == 5
    assert difference.mean() <= 2 * difference.std(ddof=1) / np.sqrt(len(difference))


def test_the_default_is_chosen_without_the_table_that_it_is_used_on():
    assert {chosen_without(ROWS, table) for table in tables_of(ROWS)} == {DEFAULT}


def test_ranks_are_those_of_a_small_case():
    rows = [
        {"table": t, "method": m, "seed": 0, "rows": 9, "rmse": e, "nll": n}
        for t, m, e, n in [("a", "x", 1, 1), ("a", "y", 2, 1), ("b", "x", 3, 2), ("b", "y", 2, 1), ("a", "z", 0, 0)]
    ]
    assert methods_of(rows) == ["x", "y"]
    mean, error = mean_ranks(rows, ["x", "y"], "error")
    assert mean.tolist() == [1.5, 1.5]
    assert np.allclose(error, 0.5)
    assert mean_ranks(rows, ["x", "y"], "nll")[0].tolist() == [1.75, 1.25]
    assert measured(rows, "b", "y", "error").tolist() == [2]


def test_where_rows_are_missing_the_default_is_no_worse_than_what_was_there():
    """Gaps of five sets: naval and energy, where networks are sure and wrong, gain; the others lose nothing."""
    told = json.loads((ROOT / "results" / "gap-recipe.json").read_text(encoding="utf-8"))["summary"]
    assert told["naval"]["default"][0] > told["naval"]["no network"][0]
    assert told["energy"]["default"][0] >= -3.9
    for name in ("boston", "concrete", "wine"):
        assert told[name]["default"][0] >= told[name]["none"][0] - 0.01


INTERVALS = json.loads((ROOT / "results" / "table-intervals.json").read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize("table", sorted({row["table"] for row in INTERVALS}))
def test_intervals_hold_what_they_promise(table):
    """95 % within one point, and no fifth of the rows is left out."""
    own = [row for row in INTERVALS if row["table"] == table]
    assert len(own) >= 20
    inside = np.array([row["inside"] / row["rows"] for row in own])
    error = inside.std(ddof=1) / np.sqrt(len(own))
    assert 0.94 - 2 * error <= inside.mean() <= 0.96 + 2 * error
    for by in ("by prediction", "by distance"):
        for fifth in range(5):
            shares = np.array([row[by][fifth][1] / row[by][fifth][0] for row in own])
            assert shares.mean() >= 0.88 - 2 * shares.std(ddof=1) / np.sqrt(len(own))
