from __future__ import annotations

import json
import math
import multiprocessing

import pytest
import torch
from scipy import stats

from dapcal.experiments import parallel
from dapcal.experiments.datasets import Table
from dapcal.experiments.gap.evaluation import evaluate
from dapcal.experiments.gap.experiment import EXPERIMENT, run_plan
from dapcal.experiments.gap.summary import summarise
from dapcal.experiments.gap.training import Plan, choose, prepare, score_ensemble, score_map, score_variational, train
from dapcal.experiments.published import UCI_GAP
from dapcal.experiments.records import Run

ROWS = 240


def waves(name: str) -> Table:
    """Three features, the last constant; the middle third by each of them is left out."""
    generator = torch.Generator().manual_seed(len(name))
    x = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 30.0, 1.0]) + 5
    x[:, 2] = 7.0
    y = 4 * x[:, 0].sin() + 0.1 * x[:, 1] + 0.3 * torch.randn(ROWS, generator=generator, dtype=torch.float64)
    third = ROWS // 3
    splits = tuple(x[:, k].argsort(stable=True)[third : 2 * third].sort().values for k in range(3))
    return Table(x, y, ("a", "b", "c"), "y", splits)


PLAN = Plan(
    tables=("waves",), load=waves, rates=(1e-2, 1e-3), paper_rates=(1e-3,), epochs=(2, 8), hidden=(8, 8),
    batch_size=32, members=3, draws=20, together=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def trained():
    table = waves("waves")
    splits = [prepare(PLAN, table, number, seed=0) for number in (0, 1)]
    return splits, train(PLAN, splits, (0, 1), seed=0)


@pytest.fixture(scope="module")
def rows(trained):
    splits, networks = trained
    return evaluate(PLAN, splits[1], {name: value[1] for name, value in networks.items()}, seed=0)


def test_parts_are_disjoint_and_standardised_by_the_training_part():
    table = waves("waves")
    split = prepare(PLAN, table, 0, seed=0)
    assert [len(part.x) for part in split[:3]] == [144, 16, 80]
    raw = torch.cat([part.y for part in split[:3]])[:, 0] * split.scale
    assert torch.allclose(
        (raw - raw.mean()).double().sort().values, (table.y - table.y.mean()).sort().values, atol=1e-4
    )
    assert split.train.y.mean().abs() < 1e-6
    assert split.train.y.std(correction=0) == pytest.approx(1, abs=1e-6)
    assert split.train.x[:, :2].std(0, correction=0).tolist() == pytest.approx([1, 1], abs=1e-6)
    assert all((part.x[:, 2] == 0).all() for part in split[:3])
    gap = split.test.x[:, 0]
    assert not ((split.train.x[:, 0] > gap.min()) & (split.train.x[:, 0] < gap.max())).any()


def test_the_held_out_rows_follow_the_seed():
    table = waves("waves")
    one, other = (prepare(PLAN, table, 0, seed).held_out.y for seed in (0, 1))
    assert torch.equal(one, prepare(PLAN, table, 0, 0).held_out.y)
    assert not torch.equal(one, other)


def test_choice_is_the_largest_score_among_allowed_rates():
    scores = torch.tensor([[0.0, 3.0], [2.0, math.nan]])
    assert choose(PLAN, scores) == (0, 1)
    assert choose(PLAN, scores, rates=(1e-3,)) == (1, 0)


def test_scores_are_those_of_the_posteriors(trained, rows):
    """The batched scores that choose, against the library's posteriors at the same setting."""
    splits, networks = trained
    own, held_out = {name: value[1] for name, value in networks.items()}, splits[1].held_out
    found = {
        "MAP": score_map(PLAN, own, held_out),
        "ensemble": score_ensemble(PLAN, own, held_out),
        "VI": score_variational(PLAN, own, held_out, "variational", seed=0),
        "VI from scratch": score_variational(PLAN, own, held_out, "scratch", seed=0),
    }
    for name, scores in found.items():
        best = float(scores.max()) - math.log(splits[1].scale)
        assert rows[name]["held_out_log_likelihood"] == pytest.approx(best, abs=1e-4)
        place = PLAN.rates.index(rows[name]["learning_rate"]), PLAN.epochs.index(rows[name]["epochs"])
        assert scores[place] == scores.max()


def test_the_papers_grid_uses_its_own_rates(rows):
    assert rows["MAP, paper's grid"]["learning_rate"] == 1e-3
    assert rows["VI from scratch, paper's grid + paper"]["learning_rate"] == 1e-3


def test_without_weight_the_paper_predicts_the_training_mean(trained, rows):
    splits, networks = trained
    setting = rows["VI + paper"]["learning_rate"], rows["VI + paper"]["epochs"]
    place = PLAN.rates.index(setting[0]), PLAN.epochs.index(setting[1])
    noise = networks["variational.log_noise"][(1, *place)].exp() * splits[1].scale
    normal = torch.distributions.Normal(torch.zeros(()), noise.double())
    expected = normal.log_prob(splits[1].test.y * splits[1].scale).mean()
    assert rows["VI + paper"]["log_likelihood_without_weight"] == pytest.approx(float(expected), abs=1e-4)


def test_every_posterior_has_its_rows(rows):
    for name in ("VI", "VI from scratch", "Laplace"):
        assert {f"{name} + paper", f"{name} + ours"} <= set(rows)
        assert {"log10_total_weight_median", "ess_median", "log_likelihood_normalised"} <= set(rows[f"{name} + paper"])
    assert "ensemble + ours" in rows
    assert "ensemble + paper" not in rows  # it has no moments


def test_ours_keeps_the_mean(rows):
    for name in ("ensemble", "Laplace"):  # that of VI moves where it is narrowed towards its network
        assert rows[f"{name} + ours"]["rmse"] == pytest.approx(rows[name]["rmse"], rel=1e-5)


def test_numbers_are_in_the_units_of_the_target(trained, rows):
    splits, networks = trained
    scaled = splits[1]._replace(scale=10 * splits[1].scale)
    other = evaluate(PLAN, scaled, {name: value[1] for name, value in networks.items()}, seed=0)
    for name, row in rows.items():
        for density in ("log_likelihood", "log_likelihood_mixture", "held_out_log_likelihood"):
            assert other[name][density] == pytest.approx(row[density] - math.log(10), abs=1e-9)
        for length in ("rmse", "crps", "width"):
            assert other[name][length] == pytest.approx(10 * row[length], rel=1e-9)
        assert other[name]["coverage"] == row["coverage"]


def record(table, constant, alone, adjusted):
    return {
        "table": table, "constant": constant,
        "rows": {"VI": {"log_likelihood": alone}, "VI + ours": {"log_likelihood": adjusted, "phi": 1.0}},
    }  # fmt: skip


def test_summary_by_hand():
    summary = summarise([
        record("a", False, -4.0, -1.0), record("a", False, -2.0, -1.0), record("a", True, -9.0, -1.0),
        record("b", False, 0.0, 1.0),
    ])  # fmt: skip
    assert set(summary) == {"a", "b", "a, without constant columns"}
    assert summary["a"]["VI"]["log_likelihood"]["mean"] == -5.0
    assert summary["a"]["VI"]["log_likelihood"]["median"] == -4.0
    assert summary["a"]["VI"]["splits"] == 3
    gain = summary["a, without constant columns"]["VI + ours"]["log_likelihood_gain"]
    assert gain == {"mean": 2.0, "error": 1.0, "median": 2.0}
    assert "log_likelihood_gain" not in summary["b"]["VI"]


def test_an_interrupted_run_goes_on_to_the_same_numbers(tmp_path, monkeypatch):
    """Over one process, again with some files lost, and over two, which are forked and so have imported everything."""
    monkeypatch.setattr(parallel, "get_context", lambda _: multiprocessing.get_context("fork"))
    lines = []
    first = run_plan(PLAN, Run(work=tmp_path, say=lines.append)).numbers
    assert len(lines) == 3
    assert lines[0].startswith("waves 0, seed 0: VI ")
    assert first["summary"]["waves, without constant columns"]["MAP"]["splits"] == 2
    kept = tmp_path / "seed-0-waves-0.json"
    kept.write_text(kept.read_text().replace('"column": "a"', '"column": "kept"'))
    (tmp_path / "seed-0-waves-1.json").unlink()
    (tmp_path / "seed-0-waves-2.json").unlink()
    (tmp_path / "seed-0-waves-2.safetensors").unlink()
    second = run_plan(PLAN, Run(work=tmp_path, jobs=2)).numbers
    assert second["splits"][0]["column"] == "kept"
    assert json.dumps(second["summary"]) == json.dumps(first["summary"])
    assert json.dumps(second["splits"][1:]) == json.dumps(first["splits"][1:])
    assert not list(tmp_path.glob(".*"))


def test_of_several_seeds_errors_are_over_their_means_over_splits():
    values = {0: (-4.0, -2.0, -3.0), 1: (-8.0, -6.0, -1.0), 2: (-1.0, 0.0, -2.0)}
    records = [record("a", False, alone, -1.0 - seed) | {"seed": seed} for seed, own in values.items() for alone in own]
    found = summarise(records)["a"]
    means = [-3.0, -5.0, -1.0]
    expected = {"mean": -3.0, "error": stats.sem(means), "median": -2.0}
    assert found["VI"]["log_likelihood"] == pytest.approx(expected)
    assert found["VI"]["splits"] == 3
    gains = [-1 + 3, -2 + 5, -3 + 1]
    expected = {"mean": 1.0, "error": stats.sem(gains), "median": 1.0}
    assert found["VI + ours"]["log_likelihood_gain"] == pytest.approx(expected)


def test_several_seeds_stand_in_one_file_and_each_is_that_of_a_run_of_its_own(tmp_path):
    both = run_plan(PLAN, Run(work=tmp_path, seed=3, seeds=2)).numbers
    assert both["seeds"] == [3, 4]
    assert [(one["seed"], one["split"]) for one in both["splits"]] == [(s, k) for s in (3, 4) for k in range(3)]
    alone = run_plan(PLAN, Run(work=tmp_path / "alone", seed=4)).numbers
    assert json.dumps(both["splits"][3:]) == json.dumps(alone["splits"])
    assert json.dumps(both["splits"][:3]) != json.dumps(alone["splits"])


def test_the_experiment_names_what_the_paper_published():
    assert set(UCI_GAP) == set(Plan().tables)
    assert EXPERIMENT.settings is not None
    assert EXPERIMENT.settings["epochs"] == (20, 40, 100, 200)
