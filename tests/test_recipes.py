"""A recipe takes a matrix to a calibrated posterior, also where a table is small or full of equal rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dapcal import artifact
from dapcal.data import Labelled, split
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.recipes import POSTERIORS, Recipe, divide, fit, network

QUICK = Recipe(hidden=(16,), epochs=12, members=2, draws=5, learning_rate=0.02, batch_size=32, fast=True, refit=False)


def classes(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def numbers(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator)
    y = x[:, 0] - x[:, 1] ** 2 + 0.1 * torch.randn(n, generator=generator)
    return x, (y - y.mean()) / y.std()


@pytest.mark.parametrize("name", POSTERIORS)
@pytest.mark.parametrize("task", ["classes", "numbers"])
def test_every_posterior_learns_and_comes_back_from_a_file(name, task, tmp_path):
    recipe = replace(QUICK, posterior=name, epochs=25, learning_rate=0.04)
    (x, y), likelihood, outputs = (
        (classes(240), Categorical(), 3) if task == "classes" else (numbers(240), Gaussian(), 1)
    )
    fitted = fit(x, y, likelihood, outputs, recipe)
    prediction = fitted.calibrated(fitted.held_out.x)
    if task == "classes":
        assert (prediction.probs.argmax(-1) == fitted.held_out.y).double().mean() > 0.85
    else:
        assert (prediction.mean - fitted.held_out.y).square().mean() < 0.3
    fitted.calibrated.save(tmp_path / "model.dap")
    again = artifact.load(tmp_path / "model.dap", network(3, outputs, recipe, 3))
    torch.testing.assert_close(again(x).mean, fitted.calibrated(x).mean)


def test_a_seed_says_everything():
    x, y = classes(80)
    first, again, other = (fit(x, y, Categorical(), 3, replace(QUICK, seed=s)).calibrated(x).probs for s in (4, 4, 5))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_predictions_have_the_dtype_of_the_inputs(dtype):
    x, y = classes(80)
    fitted = fit(x.to(dtype), y, Categorical(), 3, QUICK)
    assert fitted.calibrated(x.to(dtype)).probs.dtype == dtype


def test_every_row_goes_to_one_side_and_every_class_is_trained_on():
    y = torch.cat([torch.zeros(70), torch.ones(25), torch.full((4,), 2.0), torch.full((1,), 3.0)]).long()
    x = torch.arange(100.0)[:, None]
    train, held_out = divide(Labelled(x, y), Recipe(validation=0.4), classes=True)
    assert torch.equal(torch.cat([train.x, held_out.x]).sort(0).values, x)
    # 40 % of 70, 25, 4 and 1 rows are 28, 10, 1.6 and 0.4; the one row of class 3 must stay in training
    assert held_out.y.bincount(minlength=4).tolist() == [28, 10, 2, 0]
    assert torch.equal(train.y, y[train.x[:, 0].long()])


@pytest.mark.parametrize(("rows", "held"), [(8, 4), (10, 4), (30, 10), (120, 40), (150, 40), (300, 60)])
def test_small_tables_hold_out_enough_to_calibrate(rows, held):
    data = Labelled(torch.randn(rows, 2), torch.randn(rows))
    train, held_out = divide(data, Recipe(validation=0.2), classes=False)
    assert (len(train.x), len(held_out.x)) == (rows - held, held)
    train, _ = divide(data, Recipe(validation=0.99), classes=False)
    assert len(train.x) >= 4


def test_rows_that_give_p_values_change_nothing_else():
    x, y = numbers(120)
    fitted = fit(x, y, Gaussian(), 1, QUICK)
    _, second = split(len(fitted.held_out.x), torch.Generator().manual_seed(QUICK.seed))
    spoilt = y.clone()
    for row in fitted.held_out.x[second]:
        spoilt[(x == row).all(1)] += 100
    other = fit(x, spoilt, Gaussian(), 1, QUICK)
    assert torch.equal(other.calibrated.posterior.draws, fitted.calibrated.posterior.draws)
    assert other.calibrated.phi == fitted.calibrated.phi


@pytest.mark.parametrize("refit", [False, True])
def test_p_values_are_valid(refit):
    x, y = classes(2000)
    calibrated = fit(x, y, Categorical(), 3, replace(QUICK, epochs=3, refit=refit)).calibrated
    p = calibrated(classes(4000, seed=1)[0]).ood_p_value
    for level in (0.05, 0.2, 0.5):
        # 200 held-out scores: the level that holds for new inputs is Beta distributed around it
        assert float((p <= level).double().mean()) <= level + 3 * (level * (1 - level) / 200) ** 0.5


def test_a_refit_replaces_the_members_alone(tmp_path):
    x, y = classes(120)
    told: list[tuple[str, int, int]] = []
    before = fit(x, y, Categorical(), 3, QUICK).calibrated
    after = fit(x, y, Categorical(), 3, replace(QUICK, refit=True), lambda *report: told.append(report)).calibrated
    assert not torch.equal(after.posterior.draws, before.posterior.draws)
    assert torch.equal(after.posterior.center, before.posterior.center)
    new = 3 * torch.randn(200, 3)
    for space, old in zip(after.distance.spaces, before.distance.spaces, strict=True):
        assert torch.equal(space.raw(new), old.raw(new)), "held-out rows are to it as new ones are"
        assert space.radius == old.radius
    assert torch.equal(after(new).ood_p_value, before(new).ood_p_value)
    assert torch.equal(after.evidence.held_out, before.evidence.held_out)
    assert torch.equal(after.evidence.weights, before.evidence.weights)
    stage, done, total = told[-1]
    assert (stage, done) == ("training on all rows", total)
    assert f"trained again on all rows, {total // 2} epochs each" in after.notes[-1]
    after.save(tmp_path / "model.dap")
    again = artifact.load(tmp_path / "model.dap", network(3, 3, QUICK))
    torch.testing.assert_close(again(x).probs, after(x).probs)


def test_a_refit_learns_from_the_rows_that_were_held_out():
    x, y = numbers(120)
    recipe = replace(QUICK, refit=True)
    fitted = fit(x, y, Gaussian(), 1, recipe)
    _, second = split(len(fitted.held_out.x), torch.Generator().manual_seed(recipe.seed))
    moved = y.clone()
    for row in fitted.held_out.x[second]:
        moved[(x == row).all(1)] += 3
    other = fit(x, moved, Gaussian(), 1, recipe)
    assert (other.calibrated(x).mean.mean() - fitted.calibrated(x).mean.mean()) > 0.1


def test_training_stops_where_the_held_out_nll_rises():
    x, _ = classes(200)
    noise = torch.randint(0, 2, (200,), generator=torch.Generator().manual_seed(3))  # nothing to learn
    counts: list[int] = []
    recipe = replace(QUICK, epochs=200, prior_scale=10.0)
    fitted = fit(x, noise, Categorical(), 2, recipe, lambda stage, done, _: stage == "training" and counts.append(done))
    assert len(counts) < 200
    nll = -fitted.calibrated(fitted.train.x).log_prob(fitted.train.y).mean()
    assert nll > 0.5  # 200 epochs would learn the noise by heart


@pytest.mark.parametrize(("name", "runs"), [("ensemble", 2), ("variational", 2), ("swag", 2), ("laplace", 1)])
def test_progress_counts_all_epochs(name, runs):
    told: list[tuple[str, int, int]] = []
    x, y = classes(80)
    fit(x, y, Categorical(), 3, replace(QUICK, posterior=name), lambda *report: told.append(report))
    training = [(done, total) for stage, done, total in told if stage == "training"]
    assert training[-1] == (runs * 12, runs * 12), "the bar is full where networks have stopped early, too"
    epochs = [done for done, _ in training[:-1]]
    assert epochs == sorted(set(epochs))
    assert epochs[-1] > (runs - 1) * 12
    assert {total for _, total in training} == {runs * 12}
    assert told[-2:] == [("calibrating", 0, 1), ("calibrating", 1, 1)]


TABLES = {
    "three rows many times": (torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, 2.0]]).repeat(30, 1), torch.arange(90) % 3),
    "one-hot columns": (torch.eye(6)[torch.arange(120) % 6], torch.arange(120) % 2),
    "twins in pairs": (classes(40)[0].repeat_interleave(2, 0), classes(40)[1].repeat_interleave(2)),
    "a column that is constant": (torch.cat([classes(60)[0], torch.zeros(60, 1)], 1), classes(60)[1]),
    "eight rows": classes(8, seed=2),
    "a class with one row": (classes(60)[0], torch.cat([torch.arange(59) % 2, torch.tensor([2])])),
}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("task", ["classes", "numbers"])
def test_tables_that_are_odd_are_fitted_all_the_same(table, task):
    x, y = TABLES[table]
    if task == "classes":
        fitted = fit(x, y, Categorical(), int(y.max()) + 1, QUICK)
    else:
        fitted = fit(x, y.float(), Gaussian(), 1, QUICK)
    near, far = fitted.calibrated(fitted.train.x), fitted.calibrated(x + 100)
    assert near.mean.isfinite().all()
    assert far.ood_score.min() > near.ood_score.max()
    if fitted.calibrated.distance.spaces or table != "eight rows":  # of which two say whether a distance counts
        assert far.distance.min() > near.distance.max()


def test_warnings_of_the_calibration_are_notes():
    x, y = classes(60)
    notes = fit(x, y, Categorical(), 3, QUICK).calibrated.notes
    assert any("calibrating on the hardest 30 %" in note for note in notes)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.randn(3, 2), torch.tensor([0, 1, 0]), "at least 8 rows, got n_samples = 3; .*a hundred or more"),
        (torch.randn(20, 2), torch.zeros(20).long(), "at least 2 classes, got 1 class: all 20 targets are the same"),
        (torch.ones(20, 2), torch.arange(20) % 2, "rows that differ, but all inputs are the same"),
        (torch.randn(20, 2), torch.arange(20), "Only 0 of 20 rows can be held out .*merge rare classes"),
        (torch.tensor([[0.0], [float("nan")]] * 10), torch.arange(20) % 2, "NaN or inf in 10 of 20 rows .*impute"),
    ],
)
def test_what_no_network_can_learn_from_is_refused(x, y, message):
    with pytest.raises(ValueError, match=message):
        fit(x, y, Categorical(), 20, QUICK)


def test_constant_targets_are_refused():
    with pytest.raises(ValueError, match="targets that differ: all 20 targets are the same"):
        fit(torch.randn(20, 2), torch.ones(20), Gaussian(), 1, QUICK)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"posterior": "magic"}, "one of ensemble, tabm, laplace, variational, swag, dropout, got 'magic'"),
        ({"hidden": ()}, "widths of one hidden layer or more"),
        ({"validation": 1.0}, "between 0 and 1 .the share held out., got 1.0"),
        ({"members": 1}, "`members` and `draws` >= 2, got 1 and 50; one network has no spread"),
        ({"dropout": 0.0}, "`dropout` between 0 and 1, got 0.0"),
    ],
)
def test_recipes_that_cannot_work_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**change)


def test_training_takes_one_thread_and_gives_the_others_back():
    before, seen = torch.get_num_threads(), set()
    torch.set_num_threads(2)
    try:
        x, y = classes(120)
        fit(
            x,
            y,
            Categorical(),
            3,
            replace(QUICK, fast=False),
            lambda stage, *_: seen.add((stage, torch.get_num_threads())),
        )
        assert seen == {("training", 1), ("leaving out regions", 1), ("calibrating", 2)}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
