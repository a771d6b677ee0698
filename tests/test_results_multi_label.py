"""The committed results of several labels: the page shows them, and they keep what is promised."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dapcal.experiments.page.multi_label import excesses, multi_label_page

ROOT = Path(__file__).parent.parent
FOUND = json.loads((ROOT / "results" / "multi-label.json").read_text(encoding="utf-8"))
ONE, EACH = (FOUND["compared"][f"{way}, calibrated"] for way in ("one network", "a network a label"))


def test_the_page_shows_the_result_file():
    text = (ROOT / "docs" / "targets.md").read_text(encoding="utf-8")
    assert multi_label_page(text, ROOT / "results") == text, "run `make page`"


@pytest.mark.parametrize("piece", FOUND["shares"])
def test_p_values_are_valid(piece):
    """Of so many numbers one may lie two standard errors above α by chance; none lies three above."""
    assert FOUND["shares"][piece]["splits"][0] >= 300
    assert max(excesses(FOUND)[piece]) < 3
    assert sum(value > 2 for value in excesses(FOUND)[piece]) <= 1


def test_calibration_harms_neither_the_likelihood_nor_the_calibration_of_labels():
    before = FOUND["compared"]["one network"]
    for measure, allowed in (("NLL", 0.01), ("calibration error", 0.0)):
        difference = np.subtract(ONE[measure], before[measure])
        assert difference.mean() <= allowed + difference.std(ddof=1) / len(difference) ** 0.5
    assert ONE["accuracy"] == pytest.approx(before["accuracy"], abs=1e-3)  # where two answers are equally likely


def test_one_network_is_no_worse_than_one_for_each_label():
    difference = np.subtract(ONE["NLL"], EACH["NLL"])
    assert difference.mean() <= difference.std(ddof=1) / len(difference) ** 0.5
    assert np.mean(ONE["flagged"]) < 0.06 < np.mean(EACH["flagged"])
