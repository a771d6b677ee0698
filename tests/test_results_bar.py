"""The bar: passed or failed by numbers that a reader can check by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from dapcal.experiments.cifar.rows import ONE
from dapcal.experiments.images.methods import methods
from dapcal.experiments.page.bar import KINDS, Verdict, section, verdict
from dapcal.experiments.page.cells import Number
from dapcal.experiments.page.files import read_images
from dapcal.experiments.page.pairs import Pair
from summary_cases import experiment, method, written

SINGLE, SEVERAL = KINDS
FIRST, SECOND = Pair("MNIST", "SVHN"), Pair("CIFAR-10", "SVHN")


def judged(folder: Path, *files: dict[str, Any], kind: Any = SINGLE) -> Verdict:
    written(folder, *files)
    images = [found for data in files if (found := read_images(folder, data["experiment"])) is not None]
    found = verdict(kind, images)
    assert found is not None
    return found


def digits(ours: list[float], other: list[float], nll: float = 0.1, ece: float = 0.01) -> dict[str, Any]:
    rows = {
        ONE: [method({"SVHN": value}, nll=nll, ece=ece) for value in ours],
        "MAP": [method({"SVHN": 70}, nll=0.2, ece=0.02) for _ in ours],
        "energy": [method({"SVHN": value}) for value in other],
    }
    return experiment("mnist", ("SVHN",), rows)


def photographs(ours: float | None = 95, other: float = 94) -> dict[str, Any]:
    rows = {
        "MAP": [method({"SVHN": 80}, nll=0.3, ece=0.03)],
        "energy": [method({"SVHN": other})],
        ONE: [None if ours is None else method({"SVHN": ours}, nll=0.2, ece=0.02)],
    }
    return experiment("cifar10", ("SVHN",), rows)


def test_names_are_those_of_the_tables():
    assert SINGLE.ours == ONE
    assert {SINGLE.alone, SEVERAL.alone, SEVERAL.ours} <= set(methods(()))


def test_all_of_it_holds(tmp_path: Path):
    found = judged(tmp_path, digits([91, 93], [90, 90]), photographs())
    ours, best, other = found.mean
    assert ours is not None
    assert other is not None
    assert (ours.mean, best, other.mean) == (93.5, "energy", 92.0)
    assert found.passed is True
    text = "\n".join(section([one for name in ("mnist", "cifar10") if (one := read_images(tmp_path, name))]))
    assert "| **all of it** | yes |" in text
    assert "| MNIST → SVHN | 92.0 ± 1.0 | 90.0 ± 0.0 (energy) | +2.0 ± 1.0 | yes |" in text
    assert "| NLL, MNIST | 0.100 ± 0.000 | 0.200 ± 0.000 | −0.100 ± 0.000 | yes |" in text


def test_one_pair_below_the_best_fails_although_the_mean_is_the_highest(tmp_path: Path):
    found = judged(tmp_path, digits([90, 90.2], [91.9, 92.3]), photographs(99, 90))
    assert found.highest is True
    beside = found.near_best[FIRST]
    assert beside is not None
    assert beside.difference == pytest.approx((-2.0, stats.sem([-1.9, -2.1])))
    assert (found.nowhere_below, found.passed) == (False, False)


@pytest.mark.parametrize(
    ("ours", "other", "holds"),
    [
        ([90, 90], [91, 91], True),  # a point, not more
        ([90, 90], [91.1, 91.1], False),
        ([90, 94], [92, 92.2], True),  # 0.1 below
        ([88, 92], [92, 92], True),  # 2 below, with an error of 2
        ([90], [91.1], False),  # one seed has no error
    ],
)
def test_a_point_and_two_standard_errors(ours, other, holds, tmp_path: Path):
    assert judged(tmp_path, digits(ours, other)).nowhere_below is holds


def test_a_higher_nll_or_ece_fails(tmp_path: Path):
    found = judged(tmp_path, digits([99, 99], [90, 90], nll=0.21), photographs())
    assert (found.lower_in("NLL"), found.lower_in("ECE"), found.passed) == (False, True, False)
    found = judged(tmp_path, digits([99, 99], [90, 90], ece=0.02), photographs())
    assert (found.lower_in("NLL"), found.lower_in("ECE"), found.passed) == (True, False, False)


def test_what_was_not_measured_is_not_known_and_what_fails_fails_all_the_same(tmp_path: Path):
    found = judged(tmp_path, digits([99, 99], [90, 90]), photographs(None))
    assert found.pairs == (FIRST,)
    assert found.near_best[SECOND] is None
    assert (found.highest, found.nowhere_below, found.lower_in("NLL"), found.passed) == (None, None, None, None)
    assert found.mean[0] == Number(99.0, 0.0)
    assert judged(tmp_path, digits([80, 80], [90, 90]), photographs(None)).passed is False


def test_a_lower_mean_fails(tmp_path: Path):
    assert judged(tmp_path, digits([90, 90], [90.5, 90.5]), photographs(90, 90.5)).highest is False


def test_the_best_other_is_looked_for_under_the_seeds_of_ours(tmp_path: Path):
    data = digits([90, 92], [95, 80])
    data["runs"][1]["rows"].pop(ONE)
    beside = judged(tmp_path, data).near_best[FIRST]
    assert beside is not None
    assert (beside.name, beside.other.mean, beside.difference.mean) == ("energy", 95, -5)


def test_ensembles_are_held_to_it_by_themselves(tmp_path: Path):
    rows = {
        "DE": [method({"SVHN": 90}, nll=0.2, ece=0.02)] * 2,
        "DE + DAP, ours": [method({"SVHN": 91}, nll=0.1, ece=0.01)] * 2,
        "energy": [method({"SVHN": 99})] * 2,
    }
    assert judged(tmp_path, experiment("mnist", ("SVHN",), rows), kind=SEVERAL).passed is True
    assert verdict(SINGLE, [found for name in ("mnist",) if (found := read_images(tmp_path, name))]) is None
