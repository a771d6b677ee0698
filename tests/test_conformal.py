"""Intervals by residuals: exact ranks, valid whatever the model, within bounds, and a note where rows are few."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dapcal import artifact
from dapcal.likelihoods import Conformal, Gaussian, Moments, NoiseHead, VaryingNoise, crossed, scores_of
from dapcal.recipes import Recipe, fit, network
from dapcal.recipes.intervals import Bounds, note

QUICK = Recipe(posterior="ensemble", hidden=(8,), epochs=10, members=2, learning_rate=0.02, batch_size=32, fast=True)


def rows(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator)
    noise = torch.randn(n, 1, generator=generator).abs().exp() - 1  # skewed and heavy: no Gaussian
    return x, x[:, :1] + 0.3 * noise


@pytest.mark.parametrize(("n", "level", "rank"), [(19, 0.95, 19), (39, 0.95, 38), (99, 0.9, 90), (20, 0.5, 11)])
def test_half_widths_are_order_statistics(n, level, rank):
    scores = torch.arange(1.0, n + 1, dtype=torch.float64)[:, None]
    assert Conformal(scores).half(level, 1.96).tolist() == [rank]


def test_too_few_rows_give_the_largest_residual_or_a_gaussian():
    scores = torch.tensor([[0.5], [3.0]], dtype=torch.float64)
    assert Conformal(scores).half(0.95, 1.96).tolist() == [3.0]
    assert Conformal(scores / 10).half(0.95, 1.96).tolist() == [1.96]


@pytest.mark.parametrize("likelihood", [Gaussian(1.0), NoiseHead()])
def test_coverage_is_that_of_exchangeable_rows(likelihood):
    """Over many draws of n judging rows and one new row the mean coverage is ⌈(n + 1) level⌉/(n + 1), exactly."""
    generator = torch.Generator().manual_seed(0)
    n, level, tries = 39, 0.9, 4000
    y = torch.randn(n + 1, tries, generator=generator, dtype=torch.float64) ** 3  # K targets stand for as many tables
    mean, variance = torch.zeros(n, tries, dtype=torch.float64), torch.ones(n, tries, dtype=torch.float64)
    own = replace(likelihood, conformal=Conformal(scores_of(mean, variance, y[:n])))
    ends = own.interval_of(mean[:1], variance[:1], level)
    inside = ((ends.lower <= y[n]) & (y[n] <= ends.upper)).double().mean()
    assert float(inside) == pytest.approx(36 / 40, abs=3 * (0.09 / tries) ** 0.5)


def test_a_row_with_more_noise_has_a_wider_interval():
    own = Gaussian(1.0, Conformal(torch.full((100, 1), 2.0, dtype=torch.float64)))
    ends = own.interval_of(torch.zeros(2, 1), torch.tensor([[1.0], [9.0]]), 0.95)
    assert (ends.upper - ends.lower).flatten().tolist() == [4.0, 12.0]


def test_bounds_hold_for_intervals_and_what_tables_show():
    x, y = rows(200)
    y = y - y.min()
    fitted = fit(x, y, Gaussian(), 1, QUICK, bounds=Bounds(lower=0.0)).calibrated
    columns = fitted(x).columns()
    assert columns["lower"].min() == 0
    assert (columns["lower"] <= columns["prediction"]).all()
    assert (columns["prediction"] <= columns["upper"]).all()
    likelihood = replace(Gaussian(), conformal=Conformal(torch.empty(0, 1), lower=0.0, upper=2.0))
    ends = likelihood.interval_of(torch.tensor([[-3.0], [1.5]]), torch.ones(2, 1), 0.95)
    assert ends.lower.flatten().tolist() == [0, 0]
    assert ends.upper.flatten().tolist() == pytest.approx([1.96, 2], abs=1e-3)
    assert likelihood.bounded(torch.tensor([-3.0, 1.5])).tolist() == [0, 1.5]


@pytest.mark.parametrize("bounds", [(0.0, None), (0.0, 4.0)])
def test_coverage_within_bounds_is_exact_and_no_interval_is_a_point(bounds):
    """Means beyond a bound of the targets, by far at times: intervals hold as many as they say, within the bounds."""
    generator = torch.Generator().manual_seed(0)
    n, level, tries = 39, 0.9, 4000
    shape = (n + 1, tries)
    y = (4 * torch.rand(shape, generator=generator, dtype=torch.float64)) ** 2 / 4  # 0 to 4
    mean = y + 6 * torch.randn(shape, generator=generator, dtype=torch.float64)  # nearly half of them beyond 0
    variance = 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)
    scores = scores_of(mean[:n], variance[:n], y[:n], *bounds)
    own = Gaussian(1.0, Conformal(scores, *bounds))
    ends = own.interval_of(mean[n:], variance[n:], level)
    inside = ((ends.lower <= y[n]) & (y[n] <= ends.upper)).double().mean()
    assert float(inside) == pytest.approx(36 / 40, abs=3 * (0.09 / tries) ** 0.5)
    assert float((ends.upper - ends.lower).min()) > 0.1
    assert float(ends.lower.min()) >= 0
    fold = torch.arange(n) % 3
    parts = Moments(*(part[:n].expand(3, n, tries)[:, :, :50] for part in (mean, variance.sqrt())))
    of_folds = crossed(parts, y[:n, :50], fold, *bounds)
    lower, upper = (of_folds.bounded(end) for end in of_folds.ends(parts, level, 1.64))
    assert float((upper - lower).min()) > 0.1


@pytest.mark.parametrize(
    ("scores", "bounds", "words"),
    [
        (torch.ones(5), (None, None), r"shape \(n, K\)"),
        (torch.ones(5, 1).long(), (None, None), "floating-point"),
        (torch.tensor([[2.0], [1.0]]), (None, None), "ascending"),
        (torch.tensor([[-1.0], [1.0]]), (None, None), ">= 0"),
        (torch.ones(5, 1), (1.0, -1.0), "`lower` <= `upper`"),
        (torch.ones(5, 1), (math.nan, None), "`lower` <= `upper`"),
    ],
)
def test_residuals_that_cannot_be_are_refused(scores, bounds, words):
    with pytest.raises(ValueError, match=words):
        Conformal(scores, *bounds)


def test_residuals_of_other_targets_are_refused():
    likelihood = Gaussian(1.0, Conformal(torch.ones(50, 3)))
    with pytest.raises(ValueError, match="Expected residuals of 1 targets, got those of 3"):
        likelihood.interval_of(torch.zeros(4, 1), torch.ones(4, 1), 0.95)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"noise": -1.0}, "`noise` > 0"),
        ({"knots": (0.0, 0.0)}, "`knots` to ascend"),
        ({"heights": (0.0,)}, "1 heights and 2 knots"),
        ({"knots": (), "heights": ()}, "0 heights and 0 knots"),
        ({"apart": (1.0, 2.0, 1.0)}, "`apart`"),
        ({"apart": (0.0, 1.0, 1.0)}, "`apart`"),
    ],
)
def test_noise_by_the_row_that_cannot_be_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        VaryingNoise(**{"noise": 0.1, "knots": (0.0, 1.0), "heights": (0.0, 2.0), **change})


def test_a_table_s_intervals_hold_as_many_targets_as_they_say(tmp_path):
    x, y = rows(1600)
    fitted = fit(x, y, Gaussian(), 1, QUICK)
    new_x, new_y = rows(4000, seed=1)
    lower, upper = fitted.calibrated(new_x).interval(0.9)
    coverage = float(((lower <= new_y) & (new_y <= upper)).double().mean())
    judging = len(fitted.calibrated.judges)
    assert abs(coverage - 0.9) < 3 * np.sqrt(0.09 / judging + 0.09 / 4000)
    fitted.calibrated.save(tmp_path / "model.dap")
    again = artifact.load(tmp_path / "model.dap", network(2, 1, QUICK))
    assert torch.equal(again(new_x).interval(0.8).upper, fitted.calibrated(new_x).interval(0.8).upper)


def test_notes_say_what_few_rows_can_promise():
    assert "too few" in note(18)
    assert "between" in note(40)
    assert "few" not in note(200)


def test_noise_follows_the_row_where_held_out_rows_say_so():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1500, 1, generator=generator) * 4 - 2
    y = x + (0.05 + 0.4 * (x > 0)) * torch.randn(1500, 1, generator=generator)
    fitted = fit(x, y, Gaussian(), 1, QUICK).calibrated
    assert isinstance(fitted.posterior.likelihood, VaryingNoise)
    assert any("noise depends on the row" in note for note in fitted.notes)
    lower, upper = fitted(torch.tensor([[-1.0], [1.0]])).interval(0.9)
    width = (upper - lower).flatten()
    assert width[1] > 3 * width[0]
    found, expected = fitted.module()(x[:50]), fitted(x[:50])
    torch.testing.assert_close(found.variance, expected.variance, atol=1e-5, rtol=1e-4)
    alike = fit(x, x + 0.2 * torch.randn(1500, 1, generator=generator), Gaussian(), 1, QUICK).calibrated
    lower, upper = alike(torch.tensor([[-1.0], [1.0]])).interval(0.9)
    width = (upper - lower).flatten()
    assert 0.8 < width[1] / width[0] < 1.25


def test_varying_noise_is_the_formula():
    outputs = torch.tensor([[[0.0], [2.0]], [[1.0], [4.0]]], dtype=torch.float64)  # means 0.5, 3; deviations 0.5, 1
    likelihood = VaryingNoise(0.1, (0.0, 1.0), (0.0, 2.0), slope=0.5, apart=(0.25, 0.1, 0.8))
    expected = torch.tensor([0.1 * np.exp(1.0) * np.sqrt(2), 0.1 * np.exp(2.0) * np.sqrt(0.8 / 0.25)])
    torch.testing.assert_close(likelihood.conditional(outputs).variance[0, :, 0].sqrt(), expected)
    assert likelihood.rescaled(3.0).noise == pytest.approx(0.3)
    density = likelihood.log_likelihood(outputs[0], torch.zeros(2, 1, dtype=torch.float64))  # one draw: no deviation
    assert float(density[0]) == pytest.approx(-np.log(0.1) - 0.5 * np.log(2 * np.pi))
