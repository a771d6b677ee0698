"""The estimators' committed results: the page shows them, and they keep what is promised of the defaults."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dapcal.experiments.page.estimators import compared, estimators_page
from dapcal.experiments.records import DEFAULTS

ROOT = Path(__file__).parent.parent
FOUND = json.loads((ROOT / "results" / "estimators.json").read_text(encoding="utf-8"))


def test_the_page_shows_the_result_file():
    text = (ROOT / "docs" / "sklearn.md").read_text(encoding="utf-8")
    assert estimators_page(text, ROOT / "results") == text, "run `make page`"


@pytest.mark.parametrize("row", compared(FOUND), ids=lambda row: f"{row.data}, {row.measure}")
def test_the_estimators_are_as_good_as_perceptrons(row):
    """Within two standard errors, though a part of the rows is held out for p-values; the NLL on average better."""
    worse = -row.difference[0] if row.more_is_better else row.difference[0]
    assert worse <= 2 * row.difference[1]


def test_the_estimators_know_better_how_good_they_are():
    assert np.mean([row.difference[0] / row.theirs[0] for row in compared(FOUND) if "NLL" in row.measure]) < 0


def test_unknown_classes_and_moved_columns_are_told_apart():
    assert np.mean(list(FOUND["digits, one class unknown"].values())) >= 0.9
    assert all(each["auroc"] >= 0.9 for each in FOUND["one column moved"].values())


def test_the_page_says_which_defaults_it_was_made_with():
    text = " ".join((ROOT / "docs" / "sklearn.md").read_text(encoding="utf-8").split())
    made = FOUND["environment"]["defaults"]
    assert f"defaults {made}" in text
    assert ("until they are run again" in text) == (made != DEFAULTS)
