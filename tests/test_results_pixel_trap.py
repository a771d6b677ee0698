"""CIFAR-10's trap, as committed: the page shows it, pixels are out, and what the score loses is what the page says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dapcal.experiments.cifar.rows import ONE
from dapcal.experiments.page.pixel_trap import compared, pixel_trap_page, read
from dapcal.experiments.records import DEFAULTS

ROOT = Path(__file__).parent.parent
RUNS = read(ROOT / "results")


def test_the_page_shows_the_result_files():
    text = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert pixel_trap_page(text, ROOT / "results") == text, "run `make page`"


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_pixels_are_out_for_every_posterior_and_seed(run):
    assert len(run["rows"]) == 2 * run["settings"]["seeds"]
    for row in run["rows"]:
        (note,) = [note for note in row["notes"] if note.startswith("distance between inputs:")]
        assert "; out: " in note
        assert "inputs" not in [*row["distances"], *row["further"]]


def test_good_networks_gain_what_the_page_says():
    """The CIFAR-10 experiment, seeds that are finished."""
    runs = [run["rows"] for run in json.loads((ROOT / "results" / "cifar10.json").read_text(encoding="utf-8"))["runs"]]
    told = {}
    for row, score in (("MAP", "entropy"), (ONE, "OOD score")):
        found = [rows[row]["ood"][score] for rows in runs if row in rows]
        told[row] = [
            f"{100 * sum(one[name]['auroc'] for one in found) / len(found):.1f}" for name in ("SVHN", "CIFAR-100")
        ]
    text = " ".join((ROOT / "docs" / "choosing.md").read_text(encoding="utf-8").split())
    assert (
        "SVHN with an AUROC of {} and CIFAR-100 with {}, its score with {} and {}".format(*told["MAP"], *told[ONE])
        in text
    )
    (note,) = [note for note in runs[0][ONE]["facts"]["notes"] if note.startswith("distance between inputs:")]
    assert "; out: " in note


def test_every_run_says_where_and_how_it_was_made():
    assert all(run["environment"].keys() >= {"dapcal", "python", "torch", "device"} for run in RUNS.values())
    assert all(run["settings"].keys() >= {"train", "epochs", "width", "augment"} for run in RUNS.values())


def test_the_best_networks_gain_on_average():
    *_, best = RUNS
    assert sum(one.gain for one in compared(RUNS) if one.run == best) > 0


def test_weighed_evidence_is_rarely_below_the_entropy_and_equal_weights_were_where_every_distance_alone_is():
    """What the page says of these cases."""
    lower = [one for one in compared(RUNS) if one.gain < 0]
    (now,) = [one for one in lower if RUNS[one.run]["environment"]["defaults"] == DEFAULTS]
    assert round(now.gain, 1) == -1.3
    before = [one for one in lower if one is not now]
    assert -3 < min(one.gain for one in before) < -2
    for one in before:
        distances = {name: found[one.outliers] for name, found in one.row["pieces"].items() if name != "doubt"}
        assert distances
        assert max(distances.values()) < one.row["entropy"][one.outliers]


def test_weighed_evidence_of_weak_networks_gains_on_average():
    gains = [one.gain for one in compared(RUNS) if RUNS[one.run]["environment"]["defaults"] == DEFAULTS]
    assert len([gain for gain in gains if gain > 0]) == 7
    assert 2 < max(gains) < 3
    assert sum(gains) / len(gains) > 0.5
