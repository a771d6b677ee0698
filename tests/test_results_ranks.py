"""Ranks of methods: against SciPy, Demšar's table of critical values, and small cases by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from dapcal.experiments.page.drawings import Drawing
from dapcal.experiments.page.files import read_images
from dapcal.experiments.page.pairs import methods_of, pairs_of
from dapcal.experiments.page.rank_figures import diagram, section
from dapcal.experiments.page.ranks import Ranks, compared, friedman
from summary_cases import experiment, method, written

DEMSAR = {2: 1.960, 3: 2.343, 4: 2.569, 5: 2.728, 6: 2.850, 7: 2.949, 8: 3.031, 9: 3.102, 10: 3.164}
"""q / √2 at 0.05, as Demšar (2006) prints it in table 5."""


@pytest.mark.parametrize("tied", [False, True])
def test_friedmans_test_is_scipys(tied: bool):
    values = np.random.default_rng(0).normal(size=(12, 5)) + np.array([0, 0.3, 0.6, 0, 0])
    values = values.round(0) if tied else values
    found = friedman(list("abcde"), values.tolist())
    expected = stats.friedmanchisquare(*values.T)
    assert found.p_value == pytest.approx(expected.pvalue)
    ranks = stats.rankdata(-values, axis=1).mean(0)
    assert dict(zip(found.names, found.average, strict=True)) == pytest.approx(dict(zip("abcde", ranks, strict=True)))
    assert list(found.average) == sorted(found.average)


@pytest.mark.parametrize("number", list(DEMSAR))
def test_the_critical_difference_is_that_of_the_table(number: int):
    blocks = 14
    values = np.random.default_rng(1).normal(size=(blocks, number)).tolist()
    found = friedman([str(i) for i in range(number)], values)
    assert found.critical == pytest.approx(DEMSAR[number] * math.sqrt(number * (number + 1) / (6 * blocks)), rel=3e-4)


def test_demsars_example():
    """His table 6: four classifiers on 14 data sets, average ranks 3.143, 2.000, 2.893, 1.964; χ² 9.28, CD 1.25."""
    values = [
        [0.763, 0.768, 0.771, 0.798], [0.599, 0.591, 0.590, 0.569], [0.954, 0.971, 0.968, 0.967],
        [0.628, 0.661, 0.654, 0.657], [0.882, 0.888, 0.886, 0.898], [0.936, 0.931, 0.916, 0.931],
        [0.661, 0.668, 0.609, 0.685], [0.583, 0.583, 0.563, 0.625], [0.775, 0.838, 0.866, 0.875],
        [1.000, 1.000, 1.000, 1.000], [0.940, 0.962, 0.965, 0.962], [0.619, 0.666, 0.614, 0.669],
        [0.972, 0.981, 0.9751, 0.975], [0.957, 0.978, 0.946, 0.970],
    ]  # fmt: skip
    found = friedman(["C4.5", "C4.5+m", "C4.5+cf", "C4.5+m+cf"], values)
    assert found.names == ("C4.5+m+cf", "C4.5+m", "C4.5+cf", "C4.5")
    assert found.average == pytest.approx((1.964, 2.000, 2.893, 3.143), abs=5e-4)
    assert found.critical == pytest.approx(1.25, abs=5e-3)


def test_all_ties_are_no_difference():
    assert friedman(["a", "b"], [[1.0, 1.0]] * 4) == Ranks(
        ("a", "b"), (1.5, 1.5), 4, 1.0, pytest.approx(0.98, abs=0.01)
    )


def test_cliques_are_the_longest_runs_without_a_difference():
    def cliques(*average: float) -> list[tuple[int, int]]:
        return Ranks(tuple(map(str, average)), average, 1, 0.0, 1.0).cliques

    assert cliques(1.0, 1.5, 1.9, 2.4, 4.0) == [(0, 2), (1, 3)]
    assert cliques(1.0, 2.0, 3.0) == []  # the difference itself is one
    assert cliques(1.0, 1.5) == [(0, 1)]


def test_blocks_are_pairs_under_seeds_that_all_methods_have(tmp_path: Path):
    good, bad = method({"SVHN": 90, "Omniglot": 80}), method({"SVHN": 80, "Omniglot": 70})
    files = [
        experiment(
            "mnist", ("SVHN", "Omniglot"), {"a": [good] * 3, "b": [bad, None, bad], "c": [bad] * 3, "DE": [good]}
        ),
        experiment("cifar10", ("SVHN",), {"a": [good], "b": [bad], "DE": [bad]}),
    ]
    written(tmp_path, *files)
    images = [found for name in ("mnist", "cifar10") if (found := read_images(tmp_path, name)) is not None]
    one_network = [one for one in methods_of(images) if not one.ensemble]
    found = compared(one_network, pairs_of(images))
    assert found is not None
    assert found.names == ("a", "b")  # c lacks CIFAR-10
    assert found.average == (1.0, 2.0)
    assert found.blocks == 2 * 2 + 1
    assert compared([one for one in methods_of(images) if one.ensemble], pairs_of(images)) is None
    blocks = list(section(images))
    text = "\n".join(block for block in blocks if isinstance(block, str))
    assert [block.name for block in blocks if isinstance(block, Drawing)] == ["ranks-one-network"]
    assert "(5 blocks)" in text
    assert "Left out, with a pair missing: c." in text
    assert "| b | 2.00 |" in text
    assert "fewer than two have every pair" in text.split("### Ensembles")[1]


def test_the_diagram_shows_ranks_cliques_and_the_critical_difference():
    figure = diagram(Ranks(("a", "b, ours", "c"), (1.2, 1.8, 3.0), 9, 0.01, 0.9), "few").draw()
    axes = figure.axes[0]
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in dots] == [(1.2, 0), (1.8, 1), (3.0, 2)]
    bars = [line for line in axes.lines if line.get_linewidth() == 2.2]
    assert [list(line.get_ydata()) for line in bars] == [[-0.25, 1.25]]
    assert axes.texts[0].get_text() == "critical difference 0.90"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b, ours", "c"]
