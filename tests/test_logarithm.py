"""Targets that err in proportion: whether their logarithms are learnt, and what comes back in their own unit."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import torch
from scipy.stats import lognorm, norm

from dapcal import recipes
from dapcal.adjust import Inflate
from dapcal.models import load
from dapcal.models.columns import Unit, in_unit
from dapcal.models.table_fitting import fit
from dapcal.models.table_summary import summarise
from dapcal.networks import Tempered
from dapcal.recipes import Recipe
from dapcal.recipes.logarithm import smearing, smearing_of
from dapcal.report import write
from dapcal.tables import Numbers, target_from_json
from table_cases import refused, run

NOISE = 0.5  # of the logarithm
QUICK = Recipe(hidden=(16,), epochs=25, members=2, fast=True, refit=False)


def cost(x: np.ndarray) -> np.ndarray:
    """Mean of the logarithm."""
    return 7 + 0.8 * x[:, 0] - 0.4 * x[:, 1]


def rows(n: int, seed: int) -> pa.Table:
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, 2))
    return pa.table({"a": x[:, 0], "b": x[:, 1], "cost": np.exp(cost(x) + NOISE * random.normal(size=n))})


def inputs(table: pa.Table) -> np.ndarray:
    return np.stack([table["a"].to_numpy(), table["b"].to_numpy()], 1)


@pytest.fixture(scope="module")
def model():
    return fit(rows(3000, 0), "cost", recipe=QUICK)


@pytest.fixture(scope="module")
def predicted(model):
    table = rows(2000, 1)
    return table, model.predict(table).table


def test_errors_in_proportion_are_learnt_as_logarithms_and_others_are_not():
    random = np.random.default_rng(0)
    x = torch.from_numpy(random.normal(size=(1000, 2))).float()
    even, odd = (torch.from_numpy(random.normal(size=1000)) for _ in range(2))
    log = torch.from_numpy(cost(x.numpy()))
    y = (log + NOISE * even).exp()
    assert recipes.may_be_logarithmic(y)
    assert recipes.logarithm(x, y).counts
    assert not recipes.logarithm(x, 30 + 5 * log.double() + odd).counts
    assert not recipes.may_be_logarithmic(odd), "there are targets below 0"
    assert not recipes.may_be_logarithmic(100 + odd), "a logarithm is a line there"
    assert not recipes.may_be_logarithmic(y[:150]), "too few rows"


def test_the_gain_is_that_of_the_densities():
    """Trees that know nothing (inputs are noise) leave a normal and a log-normal distribution to compare."""
    random = np.random.default_rng(1)
    x, y = torch.from_numpy(random.normal(size=(4000, 1))).float(), np.exp(0.8 * random.normal(size=4000))
    found = recipes.logarithm(x, torch.from_numpy(y))
    expected = lognorm(0.8).logpdf(y) - norm(y.mean(), y.std()).logpdf(y)
    assert found.gain == pytest.approx(expected.mean(), abs=0.15)
    assert found.error > 0


def test_predictions_are_means_and_intervals_hold(model, predicted):
    table, found = predicted
    assert model.target.smearing == pytest.approx(np.exp(NOISE**2 / 2), rel=0.05)
    assert any("is learnt as a logarithm" in note for note in model.notes)
    mean = np.exp(cost(inputs(table)) + NOISE**2 / 2)  # of a log-normal distribution
    near = np.abs(inputs(table)).max(1) < 1.5
    ratio = found["prediction"].to_numpy()[near] / mean[near]
    assert np.median(ratio) == pytest.approx(1, abs=0.1)
    lower, upper, y = found["lower"].to_numpy(), found["upper"].to_numpy(), table["cost"].to_numpy()
    assert (lower > 0).all()
    assert ((lower <= y) & (y <= upper)).mean() == pytest.approx(0.95, abs=0.025)
    spread = np.hypot(found["epistemic"].to_numpy(), found["aleatoric"].to_numpy())
    assert np.median(spread[near] / found["prediction"].to_numpy()[near]) == pytest.approx(NOISE, rel=0.2)


def test_the_summary_is_in_the_targets_own_unit(model):
    summary = summarise(model)
    y = model.unit.amounts(model.halves()[1].y)[:, 0]
    x = model.halves()[1].x
    prediction = model.calibrated.judging(x)
    mean, deviation = (v[:, 0].double().numpy() for v in (prediction.mean, prediction.variance.sqrt()))
    center, scale = model.target.center, model.target.scale
    nll = -lognorm(scale * deviation, scale=np.exp(center + scale * mean)).logpdf(y)
    assert summary.nll == pytest.approx(nll.mean(), rel=1e-4)
    means = model.target.smearing * np.exp(center + scale * mean)
    assert summary.value == pytest.approx(np.sqrt(((means - y) ** 2).mean()), rel=1e-4)
    trained = model.unit.amounts(model.train.y).mean()
    assert summary.constant == pytest.approx(np.sqrt(((trained - y) ** 2).mean()), rel=1e-4)


def test_it_is_the_same_after_saving_and_in_a_report(model, predicted, tmp_path):
    table = predicted[0]
    model.save(tmp_path / "cost.dap")
    again = load(tmp_path / "cost.dap")
    assert again.target == model.target
    assert again.predict(table.slice(0, 20)).table.equals(model.predict(table.slice(0, 20)).table)
    write(again.subject("costs"), tmp_path / "costs.html")
    page = (tmp_path / "costs.html").read_text()
    assert "Predicted" in page
    assert ", as a share of the prediction" in page


def test_units_there_and_back():
    goal = Numbers(7.0, 0.5, 1.2)
    y = goal.encode(pa.chunked_array([[10.0, 2000.0]]))
    assert goal.decode(y)[:, 0].tolist() == pytest.approx([10, 2000], rel=1e-5)
    unit = Unit(7.0, 0.5, 1.2)
    assert unit.amounts(y)[:, 0].tolist() == pytest.approx([10, 2000], rel=1e-5)
    assert unit.means(y)[:, 0].tolist() == pytest.approx([12, 2400], rel=1e-5)
    step = 1e-4
    slope = (unit.amounts(y + step) - unit.amounts(y - step))[:, 0] / (2 * step)
    assert unit.log_slopes(y) == pytest.approx(np.log(slope), rel=1e-2)
    values = {"prediction": 0.0, "lower": -2.0, "upper": 2.0, "epistemic": 0.1, "aleatoric": 0.2}
    columns = {name: np.full((1, 1), value) for name, value in values.items()}
    told = {name: float(values[0, 0]) for name, values in in_unit(columns, unit).items()}
    middle = np.exp(7.0)
    assert told == pytest.approx({
        "prediction": 1.2 * middle, "lower": middle / np.e, "upper": middle * np.e,
        "epistemic": 0.1 * 0.5 * 1.2 * middle, "aleatoric": 0.2 * 0.5 * 1.2 * middle,
    })  # fmt: skip
    assert np.isfinite(unit.amounts([1e6, -1e6])).all(), "however wide an interval is"


def test_means_add_up_to_what_the_targets_do():
    y, median = torch.tensor([1.0, 2.0, 30.0]), torch.tensor([1.0, 1.0, 20.0])
    assert float((smearing(y, median) * median).sum()) == pytest.approx(33)
    assert smearing(y, torch.tensor([0.0, 0.0, 0.1])) == 5, "a few targets make this mean"
    assert smearing(torch.tensor([1.0, torch.inf]), torch.ones(2)) == 1


def test_the_factor_is_that_of_the_model_that_predicts():
    """Of a target that is all but known: trees that are asked beforehand know less of it than the model does."""
    draws = np.random.default_rng(0)
    x = draws.uniform(0, 3, 1200)
    table = pa.table({"x": x, "z": draws.normal(size=1200), "y": np.exp(x) * (1 + 0.001 * draws.normal(size=1200))})
    model = fit(table.slice(0, 1000), "y", recipe=Recipe(fast=True, trees=False, hidden=(64,)), log=True)
    found = model.predict(table.slice(1000).drop_columns(["y"]), level=0.95).table
    mean, lower, upper = (found[name].to_numpy() for name in ("prediction", "lower", "upper"))
    assert ((lower <= mean) & (mean <= upper)).mean() > 0.95
    y = table["y"].to_numpy()[1000:]
    assert (mean - y).mean() == pytest.approx(0, abs=3 * (mean - y).std() / math.sqrt(200))


def test_what_trees_say_of_the_factor_is_bounded_by_the_errors_of_the_model():
    median = torch.rand(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(200)
    y = median * (0.2 * signs).exp()  # s = 0.2, so exp(s²/2) = 1.020
    assert smearing_of(y, median, 1.03) == 1.03
    assert smearing_of(y, median, 1.2) == pytest.approx(math.exp(0.04))
    assert smearing_of(y, median, 0.5) == pytest.approx(math.exp(-0.04))


def test_bounds_and_descriptions():
    goal = Numbers(7.0, 0.5, 1.2)
    assert goal.decode(torch.tensor(goal.standardised(50.0))).item() == pytest.approx(50, rel=1e-5)
    assert goal.standardised(0.0) == -np.inf
    assert target_from_json(json.loads(json.dumps(goal.as_json()))) == goal
    assert "smearing" not in Numbers(7.0, 0.5).as_json(), "files of amounts are as they were"
    with pytest.raises(ValueError, match="damaged"):
        target_from_json({**goal.as_json(), "smearing": (-1.0).hex()})
    with pytest.raises(ValueError, match=r"Row 2: the target is -1, and those of the training rows are all above 0"):
        goal.encode(pa.chunked_array([[1.0, -1.0]]))


def test_from_the_command_line(tmp_path):
    table = rows(120, 2)
    pyarrow.csv.write_csv(table, tmp_path / "rows.csv")
    small = ("--fast", "--epochs", "2", "--hidden", "4")
    asked = run("fit", tmp_path / "rows.csv", "--target", "cost", "-o", tmp_path / "m.dap", "--log", *small)
    assert asked.exit_code == 0, asked.output
    assert load(tmp_path / "m.dap").target.smearing is not None
    explained = run("explain", tmp_path / "m.dap", tmp_path / "rows.csv", "--row", "1", "--json")
    after = json.loads(explained.stdout)["after"]
    assert 0 < after["lower"][0] < after["mean"][0] < after["upper"][0]
    plain = run("fit", tmp_path / "rows.csv", "--target", "cost", "-o", tmp_path / "p.dap", "--no-log", *small)
    assert plain.exit_code == 0, plain.output
    assert load(tmp_path / "p.dap").target.smearing is None


def test_what_has_no_logarithm_is_refused(tmp_path):
    table = rows(60, 3)
    below = table.append_column("gain", pa.array(np.linspace(-1, 1, 60)))
    classes = below.append_column("kind", pa.array(["x", "y"] * 30))
    pyarrow.csv.write_csv(classes, tmp_path / "rows.csv")
    asked = ("fit", tmp_path / "rows.csv", "-o", tmp_path / "m.dap", "--log", "--target")
    refused(run(*asked, "gain"), "--log needs a target above 0, and `gain` goes down to -1")
    refused(run(*asked, "kind"), "`kind` holds classes, which have no logarithm")


def test_numbers_far_out_count_by_their_logarithm():
    """Up to two deviations as they are; beyond, 2 + log(1 + (|x| − 2)), with the same slope where both meet."""
    x = torch.tensor([-50.0, -2.0, -1.3, 0.0, 0.7, 2.0, 3.0, 1e6]).double().requires_grad_()
    want = [-2 - np.log(49), -2, -1.3, 0, 0.7, 2, 2 + np.log(2), 2 + np.log(1e6 - 1)]
    found = Tempered()(x)
    torch.testing.assert_close(found, torch.tensor(want).double())
    found.sum().backward()
    torch.testing.assert_close(x.grad, 1 / (1 + (x.detach().abs() - 2).clamp_min(0)))


def test_far_from_the_data_a_logarithm_does_not_run_away(model, tmp_path):
    """A line in logarithms predicted e^(7 + 0.8 · 40) = 9e16 there; a power of the number is a cost that exists."""
    far = pa.table({"a": [40.0, 0.1], "b": [0.0, 0.1]})
    found = model.predict(far).table
    assert found["ood"].to_pylist()[0]
    most = float(np.max(rows(3000, 0)["cost"].to_numpy()))
    assert found["prediction"].to_pylist()[0] < 10 * most
    assert found["upper"].to_pylist()[0] < 1000 * most
    model.save(tmp_path / "cost.dap")
    assert load(tmp_path / "cost.dap").predict(far).table.equals(found)


@pytest.mark.parametrize("fast", [True, False])
def test_distance_widens_no_further_than_the_logarithms_spread(fast):
    table = rows(400, 0)
    model = fit(table, "cost", recipe=replace(QUICK, fast=fast, members=2, epochs=8), log=True)
    assert model.recipe.logarithms
    if isinstance(model.calibrated.adjust, Inflate):
        assert model.calibrated.adjust.limit.own_spread
    far = model.calibrated(torch.full((1, model.encoder.width), 60.0))
    spread = float(model.train.y.double().var(correction=0))
    assert float(far.variance) <= 1.001 * max(spread, float(far.base.variance)) + float(far.base.variance)
