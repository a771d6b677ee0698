"""The committed results of flagged rows: the page shows them, and they keep what is promised."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from dapcal.experiments.page.table_flags import WAYS, flagged, mean_of, subgroup, table_flags_page

ROOT = Path(__file__).parent.parent
FOUND = json.loads((ROOT / "results" / "table-flags.json").read_text(encoding="utf-8"))["tables"]


def test_the_page_shows_the_result_file():
    text = (ROOT / "docs" / "unusual-rows.md").read_text(encoding="utf-8")
    assert table_flags_page(text, ROOT / "results") == text, "run `make page`"


@pytest.mark.parametrize("table", FOUND)
def test_wrong_units_unseen_categories_and_blanks_are_found(table):
    unit, rounded, unseen, blank = (mean_of(FOUND[table], way) for way in WAYS)
    assert unit >= 0.9
    assert rounded >= 0.88  # no promise: what was measured shall not get worse
    assert math.isnan(unseen) or unseen >= 0.95
    fewest = min(one["judging rows"] for one in FOUND[table])
    assert blank >= 1 - 3 / (fewest + 1)  # ordinary rows reach the smallest p-value, too, and ties count half


def test_ordinary_rows_are_flagged_as_often_as_they_should_be():
    """Of so many tables one may lie two standard errors above by chance; none lies three above, nor all together."""
    found = np.array([flagged(seeds) for seeds in FOUND.values()])  # (tables, 2)
    excess = (found[:, 0] - 0.05) / found[:, 1]
    assert excess.max() < 3
    assert (excess > 2).sum() <= 1
    weights = 1 / found[:, 1] ** 2
    assert abs((weights * found[:, 0]).sum() / weights.sum() - 0.05) < 2 / np.sqrt(weights.sum())


def test_a_subgroup_is_found_as_well_as_by_nearest_neighbours_and_better_than_by_a_forest():
    """By the score; few judging rows make the p-value coarser."""
    means = {who: np.mean([subgroup(seeds, who) for seeds in FOUND.values()]) for who in FOUND_BY}
    assert means["ours, score"] >= means["nearest neighbours"]
    assert means["ours"] >= means["nearest neighbours"] - 0.005
    assert means["ours"] > means["isolation forest"] + 0.05


FOUND_BY = ("ours", "ours, score", "nearest neighbours", "isolation forest")
