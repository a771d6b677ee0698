"""The page on scale, as committed: its numbers are those of the result files, and say what the page says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapcal.experiments.page.scale import read, scale_page

ROOT = Path(__file__).parent.parent
SCALE, RAY = read(ROOT / "results")


def test_the_page_shows_the_result_files():
    text = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert scale_page(text, ROOT / "results") == text, "run `make page`"


@pytest.mark.skipif(RAY is None, reason="not run yet")
def test_three_nodes_write_and_find_what_one_machine_does():
    assert RAY["same_bytes"]
    assert RAY["index"]["same_bits"]
    assert len(RAY["node_peak_mib"]) == 3


@pytest.mark.parametrize("axis", SCALE["axes"])
def test_every_axis_has_a_line_through_what_was_measured(axis):
    own = SCALE["axes"][axis]
    for value, found in zip(own["values"], own["measured"], strict=True):
        assert own["start"] + own["slope"] * value == pytest.approx(found["seconds"], rel=0.5)
