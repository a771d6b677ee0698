"""The page on scale, as committed: its numbers are those of the result files, and say what the page says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapcal.experiments.page.scale import _estimate, nodes, read, scale_page

ROOT = Path(__file__).parent.parent
SCALE, RAY = read(ROOT / "results")


def test_the_page_shows_the_result_files():
    text = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert scale_page(text, ROOT / "results") == text, "run `make page`"


@pytest.mark.skipif(RAY is None or not {"rows", "index"} <= set(RAY), reason="not run yet")
def test_three_nodes_write_and_find_what_one_machine_does():
    assert RAY["same_bytes"]
    assert RAY["index"]["same_bits"]
    assert len(RAY["node_peak_mib"]) == 3


@pytest.mark.parametrize("axis", SCALE["axes"])
def test_every_axis_has_a_line_through_what_was_measured(axis):
    own = SCALE["axes"][axis]
    for value, found in zip(own["values"], own["measured"], strict=True):
        assert own["start"] + own["slope"] * value == pytest.approx(found["seconds"], rel=0.5)


def test_the_estimate_is_in_hours_and_days_and_says_how_far_it_extrapolates():
    line = {
        "values": [1000, 2000],
        "start": 0.0,
        "slope": 0.36e-6,
        "measured": [{"file_bytes": 0}, {"file_bytes": 10**5}],
    }
    found = {"base": {"rows": 100}, "axes": {"training_points": line}}
    told = _estimate(found)  # 3.6e-9 s a point and row: 0.36 s a row, 10⁵ core hours
    assert "100,000 core hours, 11 years of one core, 2 days on the 2,048 cores of the 32 machines" in told
    assert "at most 2,000 training points were measured, and 100,000,000 are 50,000 times as many" in told
    line["values"] = [1000, 10**8]
    assert "extrapolates" not in _estimate(found)
    assert "e+" not in told


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({}, "of 4 cores;"),
        ({"load": 0.1}, "of 4 cores;"),
        ({"load": 3.21}, "of 4 cores that others used too (load average 3.2 at the start);"),
    ],
)
def test_others_on_the_machine_are_told_of_where_the_file_says_so(known, words):
    one = {"seconds": 1.0, "processor_seconds": 1.0}
    index = {"queries": 1, "points": 9, "one_index_seconds": 1.0, "shards_seconds": 1.0, "same_bits": True}
    found = {
        "one_process": one,
        "three_nodes": one,
        "index": index,
        "rows": 9,
        "columns": 2,
        "node_peak_mib": [1, 1, 1],
    }
    found |= {
        "same_bytes": True,
        "overhead_seconds": 1.0,
        "overhead_processor": 1.0,
        "environment": {"cores": 4, **known},
    }
    assert words in nodes(found)
