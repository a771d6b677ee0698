"""Means over all pairs of image sets: against numbers worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dapcal.experiments.page.cells import Number
from dapcal.experiments.page.drawings import Drawing
from dapcal.experiments.page.files import ImageResults, read_images
from dapcal.experiments.page.opening import BEST_OTHERS, headline, opening, shown
from dapcal.experiments.page.pairs import Pair, mean_over, methods_of, of_pairs, of_sets, pairs_of, spread
from dapcal.experiments.page.summary import ordered, section, summary_table
from summary_cases import experiment, method, written

PROBABLE = {"accuracy": 0.9, "nll": 0.2, "ece": 0.04}


def two() -> list[dict[str, Any]]:
    """MNIST under two seeds, CIFAR-10 under one, which lacks ensembles."""
    near, far = "Fashion-MNIST", "SVHN"
    digits = {
        "MAP": [method({near: 80, far: 90}, **PROBABLE), method({near: 84, far: 92}, **(PROBABLE | {"nll": 0.4}))],
        "energy": [method({near: 70, far: 60}), method({near: 70, far: 60})],
        "DE": [method({near: 95, far: 97}, **PROBABLE), method({near: 95, far: 97}, **PROBABLE)],
        "asked": [method({near: 99, far: 99})],
    }
    photographs = {
        "MAP": [method({"CIFAR-100": 60, "SVHN": 70}, **(PROBABLE | {"nll": 0.6}))],
        "energy": [method({"CIFAR-100": 90, "SVHN": 100})],
    }
    return [
        experiment("mnist", (near, far), digits, {"asked": "questions"}),
        experiment("cifar10", ("CIFAR-100", "SVHN"), photographs),
    ]


def read(folder: Path, *files: dict[str, Any]) -> list[ImageResults]:
    written(folder, *files)
    return [found for data in files if (found := read_images(folder, data["experiment"])) is not None]


def cells(text: str, name: str) -> list[str]:
    rows = [[cell.strip() for cell in one.split("|")[1:-1]] for one in text.splitlines()]
    return next(row[1:] for row in rows if row[:1] == [name])


def test_means_over_pairs_by_hand(tmp_path: Path):
    images = read(tmp_path, *two())
    pairs = pairs_of(images)
    assert [pair.near for pair in pairs] == [True, False, True, False]
    found = {one.name: one for one in methods_of(images)}
    assert list(found) == ["MAP", "energy", "DE"]  # no open question
    text = summary_table(list(found.values()), pairs, ["MNIST", "CIFAR-10"])
    # MAP: pairs 82, 91, 60, 70; near 82 and 60, far 91 and 70; NLL 0.3 and 0.6. No errors: CIFAR-10 has one seed
    assert cells(text, "MAP") == [
        "4 of 4", "75.8", "71.0", "80.5", "24.2", "29.0", "19.5", "0.450", "4.0", "90.0", "2.0 / 2.0",
    ]  # fmt: skip
    assert cells(text, "energy")[:4] == ["4 of 4", "80.0", "80.0", "80.0"]
    assert cells(text, "energy")[7:] == ["–", "–", "–", "2.0 / 2.0"]


def test_a_method_with_a_pair_missing_has_no_mean_and_says_so(tmp_path: Path):
    images = read(tmp_path, *two())
    pairs = pairs_of(images)
    ensemble = next(one for one in methods_of(images) if one.name == "DE")
    assert of_pairs(ensemble, pairs, "auroc") is None
    assert of_sets(ensemble, ["MNIST", "CIFAR-10"], "nll") is None
    assert of_pairs(ensemble, pairs[:2], "auroc") == Number(96, 0)
    text = "\n".join(section(images))
    assert cells(text, "DE") == ["2 of 4", *["–"] * 9, "2.0 / –"]
    assert "Without all of CIFAR-10: DE." in text
    assert [one.name for one in ordered(methods_of(images), pairs)] == ["energy", "MAP", "DE"]


def test_a_single_missing_pair_is_named(tmp_path: Path):
    files = two()
    del files[1]["runs"][0]["rows"]["energy"]["ood"]["score"]["SVHN"]
    assert "Without CIFAR-10 → SVHN: energy." in "\n".join(section(read(tmp_path, *files)))


def test_one_network_and_ensembles_have_tables_of_their_own(tmp_path: Path):
    text = "\n".join(section(read(tmp_path, *two())))
    one, several = text.split("### Ensembles")
    assert "| DE |" not in one
    assert "| MAP |" in one
    assert "| MAP |" not in several
    assert "near: MNIST → Fashion-MNIST; CIFAR-10 → CIFAR-100;" in text


def test_errors_keep_together_the_pairs_that_share_networks():
    """Sums under each seed within a set; sets are independent. Against simulated draws, and by hand."""
    first, second, third = Pair("a", "x"), Pair("a", "y"), Pair("b", "x")
    values = {
        first: {("f", 0): 1.0, ("f", 1): 3.0, ("f", 2): 8.0},
        second: {("f", 0): 2.0, ("f", 1): 4.0, ("f", 2): 3.0},
        third: {("g", 0): 5.0, ("g", 1): 9.0},
    }
    found = mean_over(list(values), values.__getitem__)
    assert found is not None
    sums = [3.0, 7.0, 11.0]
    assert found.mean == pytest.approx((4 + 3 + 7) / 3)
    assert found.error == pytest.approx(math.hypot(stats.sem(sums), stats.sem([5.0, 9.0])) / 3)
    assert spread(sums) == pytest.approx((7.0, stats.sem(sums)))


def test_the_error_of_a_mean_over_pairs_is_that_of_repeats():
    generator = np.random.default_rng(0)

    def draw() -> tuple[float, float]:
        common = generator.normal(size=(5, 1))  # networks that two pairs share
        scores = common + 0.5 * generator.normal(size=(5, 2))
        values = {Pair("a", str(i)): {("f", seed): scores[seed, i] for seed in range(5)} for i in range(2)}
        values[Pair("b", "0")] = {("g", seed): generator.normal() for seed in range(4)}
        found = mean_over(list(values), values.__getitem__)
        assert found is not None
        return found

    means, errors = np.array([draw() for _ in range(4000)]).T
    assert np.sqrt((errors**2).mean()) == pytest.approx(means.std(), rel=0.05)


def test_a_number_that_is_not_finite_is_not_hidden(tmp_path: Path):
    files = two()
    files[0]["runs"][0]["rows"]["MAP"]["test"]["nll"] = None
    assert cells("\n".join(section(read(tmp_path, *files))), "MAP")[7] == "not finite"


def test_the_page_opens_with_the_rows_that_matter(tmp_path: Path):
    files = two()
    for place, (file, far) in enumerate(zip(files, (("Fashion-MNIST", "SVHN"), ("CIFAR-100", "SVHN")), strict=True)):
        for run in file["runs"]:
            rows = run["rows"]
            rows |= {f"other {i}": method(dict.fromkeys(far, 50 + i)) for i in range(5)}
            rows["lacking"] = method(dict.fromkeys(far, 100)) if place == 0 else method({})
            rows["One network + DAP, ours"] = method(dict.fromkeys(far, 85), **(PROBABLE | {"nll": 0.1 + 0.1 * place}))
        for name in rows:
            file["parts"][name], file["main_scores"][name] = "newer", "score"
    images = read(tmp_path, *files)
    chosen = [one.name for one in shown(images)]
    # with a mean over all pairs, the highest first: ours 85, energy 80, MAP 75.8; then what is not measured on all
    assert chosen == ["One network + DAP, ours", "energy", "MAP", "other 4", "other 3", "DE"]
    assert BEST_OTHERS == 3
    text = headline(shown(images), images)
    assert cells(text, "**one network + ours**") == ["85.0 ± 0.0", "85.0", "85.0", "0.150", "4.0"]
    assert cells(text, "energy") == ["65.0 ± 0.0", "95.0", "80.0", "–", "–"]
    assert cells(text, "ensemble alone") == ["96.0 ± 0.0", "–", "–", "–", "–"]
    picture, table, *words = opening(images)
    assert isinstance(picture, Drawing)
    assert table == text
    assert "one network + ours does not pass" in words[-1]
    axes = picture.draw().axes[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()][-1] == "one network + ours"
    diamonds = [(*line.get_xdata(), *line.get_ydata()) for line in axes.lines if line.get_marker() == "D"]
    assert [place for _, place in filter(None, diamonds)] == [1, 2, 3, 4, 5]  # the ensemble, below, has none
    assert (85.0, 5) in diamonds


def test_an_ece_above_100_is_of_probabilities_that_are_none(tmp_path: Path):
    files = two()
    for file in files:
        for run in file["runs"]:
            run["rows"]["MAP"]["test"]["ece"] = 44.0
    assert cells("\n".join(section(read(tmp_path, *files))), "MAP")[8] == "over 100"
