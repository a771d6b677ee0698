"""The rule that says whether a space counts, and the standard errors that it rests on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from dapcal.distances.verdicts import Farther, Predicted, errors_predicted, farther, verdict
from dapcal.ranks import auroc, auroc_error, least_correlation, rank_correlation

FAR, NOTHING, NEAR = Farther(0.9, 0.01), Farther(0.5, 0.01), Farther(0.2, 0.01)
SURE, UNSURE, CHANCE = Predicted(0.7, 0.6), Predicted(0.7, 0.49), Predicted(0.55, 0.52)


@pytest.mark.parametrize(
    ("own", "outliers", "counts", "words"),
    [
        (SURE, [FAR, NEAR], False, "out: b outliers are nearer"),  # whatever own errors and other kinds say
        (CHANCE, [FAR, NOTHING], True, "in: a outliers are farther"),
        (SURE, [NOTHING, NOTHING], True, "in: it predicts the model's own errors"),
        (UNSURE, [NOTHING, NOTHING], False, "out: it tells neither"),
        (CHANCE, [NOTHING, NOTHING], False, "out: it tells neither"),
        (CHANCE, [Farther(0.46, 0.001), FAR], True, "in: b"),  # not 0.05 nearer
        (CHANCE, [Farther(0.44, 0.04), FAR], True, "in: b"),  # not two standard errors nearer
        (CHANCE, [Farther(0.44, 0.02), FAR], False, "out: a"),
        (CHANCE, [Farther(0.6, 0.3), NOTHING], True, "in: a"),
    ],
)
def test_the_rule(own, outliers, counts, words):
    found = verdict(own, dict(zip("ab", outliers, strict=True)))
    assert found.counts == counts
    assert words in found.words


@pytest.mark.parametrize(("m", "n", "shift", "grid"), [(30, 60, 0.7, None), (200, 50, 1.5, None), (40, 40, 0.5, 1.0)])
def test_the_standard_error_of_an_auroc_is_its_spread_over_fresh_samples(m, n, shift, grid):
    rng = np.random.default_rng(0)

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        both = rng.normal(shift, 1, m), rng.normal(0, 2, n)
        return tuple(torch.tensor(v if grid is None else np.round(v / grid)) for v in both)

    found = [(auroc(*sample), auroc_error(*sample)) for sample in (draw() for _ in range(2000))]
    values, errors = np.array(found).T
    assert 0.95 < np.sqrt((errors**2).mean()) / values.std() < 1.15  # never too small


def test_delongs_standard_error_is_that_of_all_pairs():
    rng = np.random.default_rng(1)
    one, two = torch.tensor(rng.integers(0, 9, 25) * 1.0), torch.tensor(rng.integers(0, 2, 35) * 8.0)
    wins = (one[:, None] > two).double() + 0.5 * (one[:, None] == two)
    expected = wins.mean(1).var() / 25 + wins.mean(0).var() / 35
    assert expected > 61 / (12 * 25 * 35)  # so that it counts
    assert auroc_error(one, two) == pytest.approx(math.sqrt(expected), abs=1e-12)


def test_few_that_are_separated_prove_little():
    three = torch.tensor([4.0, 5.0, 6.0])
    assert auroc_error(three, three - 3) == pytest.approx(math.sqrt(7 / 108))
    assert not farther(three - 3, three).is_nearer  # AUROC 0 of three against three
    assert farther(torch.arange(50.0), torch.arange(50.0) + 50).is_nearer
    assert math.isfinite(auroc_error(three[:1], three))


def test_errors_that_are_there_or_not():
    distance = torch.arange(100.0)
    wrong = distance >= 80
    found = errors_predicted(distance, wrong)
    assert found.value == 1
    assert 0.5 < found.lower < 1
    assert errors_predicted(distance, torch.zeros(100, dtype=torch.bool)) == (0.5, 0.0)
    # twenty errors among five hundred at 0.62: the bound is under 0.5
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(500, generator=generator)
    sample[:20] = torch.erfinv(2 * torch.linspace(0.025, 0.975, 20) - 1) * 2**0.5 + 0.43
    found = errors_predicted(sample, torch.arange(500) < 20)
    assert found.value == pytest.approx(0.62, abs=0.02)
    assert found.lower < 0.5


@pytest.mark.parametrize("slope", [0.0, 0.3, 1.0])
def test_the_bound_of_a_rank_correlation_covers(slope):
    """One-sided 97.5 %, over fresh samples."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 80))
    y = slope * x + rng.normal(size=x.shape)
    many = rng.normal(size=200_000)
    truth = spearmanr(many, slope * many + rng.normal(size=many.shape)).statistic
    rhos = [rank_correlation(torch.tensor(a), torch.tensor(b)) for a, b in zip(x, y, strict=True)]
    assert rhos[0] == pytest.approx(spearmanr(x[0], y[0]).statistic, abs=1e-12)
    covered = np.mean([least_correlation(rho, 80, 1.96) <= truth for rho in rhos])
    assert covered == pytest.approx(0.975, abs=0.02)


def test_correlations_that_say_nothing():
    assert rank_correlation(torch.ones(9), torch.arange(9.0)) == 0
    assert least_correlation(1.0, 3, 1.96) == -1
    assert errors_predicted(torch.arange(9.0), torch.arange(9.0)).value == 1
