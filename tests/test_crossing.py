"""Members that leave out a fold each: CV+ by brute force, its coverage, what members have learnt, files and exports."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dapcal import artifact
from dapcal.data import Labelled
from dapcal.likelihoods import Conformal, Gaussian, Moments, VaryingNoise, crossed
from dapcal.networks.trees import Blend, side_by_side
from dapcal.recipes import Recipe, crossing, fit, fitting, network
from dapcal.recipes.boosting import fit_trees
from dapcal.recipes.intervals import Bounds

QUICK = Recipe(hidden=(8,), epochs=10, members=2, learning_rate=0.02, batch_size=32, fast=True)


def rows(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator)
    return x, x[:, :1] + 0.3 * torch.randn(n, 1, generator=generator)


def drawn(folds: int, n: int, k: int = 1) -> Moments:
    generator = torch.Generator().manual_seed(n)
    shape = (folds, n, k)
    return Moments(
        torch.randn(shape, generator=generator, dtype=torch.float64),
        torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5,
    )


@pytest.mark.parametrize("level", [0.5, 0.8, 0.95])
def test_ends_are_those_of_the_formula(level):
    learnt, new = drawn(3, 40), drawn(3, 7)
    y = torch.randn(40, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    fold = torch.arange(40) % 3
    lower, upper = crossed(learnt, y, fold, None, None).ends(new, level, 1.96)
    for row in range(7):
        lows, highs = [], []
        for i, k in enumerate(fold.tolist()):
            score = float((y[i, 0] - learnt.mean[k, i, 0]).abs() / learnt.deviation[k, i, 0])
            reach = score * float(new.deviation[k, row, 0])
            lows.append(float(new.mean[k, row, 0]) - reach)
            highs.append(float(new.mean[k, row, 0]) + reach)
        assert float(lower[row]) == pytest.approx(sorted(lows)[math.floor(41 * (1 - level) + 1e-9) - 1])
        assert float(upper[row]) == pytest.approx(sorted(highs)[math.ceil(41 * level - 1e-9) - 1])


def test_one_fold_is_split_conformal_prediction():
    new, scores = drawn(1, 9, k=2), torch.rand(30, 2, dtype=torch.float64).sort(0).values
    plain = Conformal(scores).ends(new, 0.9, 1.6)
    own = Conformal(scores, fold=torch.zeros(30, 2, dtype=torch.long)).ends(new, 0.9, 1.6)
    torch.testing.assert_close(own, plain)


def test_too_few_rows_give_finite_ends():
    learnt, new = drawn(2, 6), drawn(2, 3)
    lower, upper = crossed(learnt, torch.zeros(6, 1).double(), torch.arange(6) % 2, None, None).ends(new, 0.95, 1.96)
    assert lower.isfinite().all()
    assert (upper - lower >= 2 * 1.96 * new.deviation.min(0).values).all()


def test_moments_of_folds_are_those_of_their_draws_alone():
    x, y = rows(120)
    fitted = fit(x, y, Gaussian(), 1, QUICK).calibrated
    ensemble = fitted(x[:5]).ensemble
    likelihood = VaryingNoise(0.1, (0.0, 1.0), (0.0, 2.0), slope=0.5, apart=(0.25, 0.1, 0.8))
    moments = likelihood.moments_of_folds(ensemble, 10)
    own = likelihood.conditional(ensemble.outputs[2:4].double())  # of the second fold
    torch.testing.assert_close(moments.mean[1], own.mean.mean(0))
    variance = own.variance.mean(0) + own.mean.var(0, correction=0) + ensemble.spread
    torch.testing.assert_close(moments.deviation[1], variance.sqrt())


def test_folds_are_of_like_sizes_with_the_largest_first():
    sizes = crossing.folds(43, seed=0).bincount().tolist()
    assert sizes == [5, 5, 5, 4, 4, 4, 4, 4, 4, 4]
    assert crossing.folds(43, seed=0).tolist() != crossing.folds(43, seed=1).tolist()


def test_few_rows_are_crossed_and_many_are_not(tmp_path):
    x, y = rows(120)
    fitted = fit(x, y, Gaussian(), 1, QUICK, bounds=Bounds(lower=float(y.min()))).calibrated
    assert len(fitted.posterior.draws) == 20, "two members of each fold"
    conformal = fitted.posterior.likelihood.conformal
    assert conformal.scores.shape == conformal.fold.shape == (120, 1)
    assert any("CV+" in note for note in fitted.notes)
    assert fitted.before.likelihood.conformal.fold is None
    lower, _ = fitted(x).interval(0.95)
    assert lower.min() >= y.min()
    fitted.save(tmp_path / "model.dap")
    again = artifact.load(tmp_path / "model.dap", network(2, 1, QUICK))
    assert torch.equal(again(x).interval(0.8).upper, fitted(x).interval(0.8).upper)
    many = fit(*rows(1000), Gaussian(), 1, QUICK).calibrated
    assert many.posterior.likelihood.conformal.fold is None
    assert len(many.posterior.draws) == 2


def test_rows_that_judge_are_in_no_refit_of_numbers():
    """A target that is changed in a judging row alone changes no member; one that is learnt does."""
    x, y = rows(1000)
    first = fit(x, y, Gaussian(), 1, QUICK)
    judge = first.held_out.x[first.calibrated.judges[0]]
    other = y.clone()
    other[(x == judge).all(1)] += 5
    second = fit(x, other, Gaussian(), 1, QUICK)
    assert torch.equal(second.calibrated.posterior.draws, first.calibrated.posterior.draws)
    other[(x == first.train.x[0]).all(1)] += 5
    third = fit(x, other, Gaussian(), 1, QUICK)
    assert not torch.equal(third.calibrated.posterior.draws, first.calibrated.posterior.draws)


def test_judges_beyond_those_that_intervals_need_are_learnt(monkeypatch):
    monkeypatch.setattr(fitting, "APART", 30)
    x, y = rows(1000)
    first = fit(x, y, Gaussian(), 1, QUICK)
    assert first.calibrated.posterior.likelihood.conformal.scores.shape == (30, 1)
    assert len(first.calibrated.judges) == len(first.calibrated.evidence.held_out) == 100, "p-values heed all of them"
    assert any("all rows but 30 of those that judge" in note for note in first.calibrated.notes)
    for judge, is_learnt in ((29, False), (30, True)):
        other = y.clone()
        other[(x == first.held_out.x[first.calibrated.judges[judge]]).all(1)] += 5
        draws = fit(x, other, Gaussian(), 1, QUICK).calibrated.posterior.draws
        assert torch.equal(draws, first.calibrated.posterior.draws) != is_learnt


def test_members_of_a_fold_have_not_learnt_it():
    x, y = rows(100)
    fold = crossing.folds(100, QUICK.seed)
    row = int((fold == 3).nonzero()[0])
    other = y.clone()
    other[row] += 1e-3
    steps = replace(QUICK, row_noise=False)
    draws = [fit(x, target, Gaussian(), 1, steps).calibrated.posterior.draws for target in (y, other)]
    same = [torch.equal(one, two) for one, two in zip(*(d.chunk(10) for d in draws), strict=True)]
    assert same[3]
    assert not any(same[:3] + same[4:])


@pytest.mark.parametrize("n", [40, 150])
def test_intervals_hold_as_many_targets_as_they_say(n):
    """The mean over small tables, each with its own new rows."""
    inside = []
    for seed in range(6):
        x, y = rows(n, seed)
        lower, upper = (
            fit(x, y, Gaussian(), 1, replace(QUICK, seed=seed)).calibrated(rows(500, 100 + seed)[0]).interval(0.9)
        )
        new = rows(500, 100 + seed)[1]
        inside.append(float(((lower <= new) & (new <= upper)).double().mean()))
    assert np.mean(inside) == pytest.approx(0.9, abs=0.06)


def test_every_fold_has_its_own_trees():
    x, y = rows(60)
    parts = [fit_trees(Labelled(x[k::2], y[k::2]), Gaussian(), 5, 0) for k in range(2)]
    blend = Blend(0.5, 0.5, side_by_side(parts), folds=2)
    outputs = torch.randn(4, 60, 1, generator=torch.Generator().manual_seed(0))
    found = blend(outputs, x)
    for draw in range(4):
        torch.testing.assert_close(found[draw], 0.5 * outputs[draw] + 0.5 * parts[draw // 2](x))


def test_trees_of_folds_are_stored_and_exported(tmp_path):
    x, y = rows(520)
    y = y + 2 * (x[:, :1] > 0)
    fitted = fit(x, y, Gaussian(), 1, QUICK).calibrated
    assert fitted.posterior.blend.folds == 10
    fitted.save(tmp_path / "model.dap")
    again = artifact.load(tmp_path / "model.dap", network(2, 1, QUICK))
    assert torch.equal(again(x[:9]).interval(0.9).lower, fitted(x[:9]).interval(0.9).lower)
    torch.testing.assert_close(fitted.module()(x[:9]).mean, fitted(x[:9]).mean, atol=1e-5, rtol=1e-4)
