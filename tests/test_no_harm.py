"""The no-harm benchmark: its cases, its statistics against scipy, and two tiny cases from data to page."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from scipy import stats

from dapcal.experiments.no_harm import measuring
from dapcal.experiments.no_harm.cases import Plan
from dapcal.experiments.no_harm.corruptions import CORRUPTED, MOVED
from dapcal.experiments.no_harm.experiment import run_plan
from dapcal.experiments.no_harm.fitting import POSTERIORS
from dapcal.experiments.no_harm.problems import KINDS, problem
from dapcal.experiments.no_harm.summary import differences, verdict
from dapcal.experiments.no_harm.verdict import Paired, holm, judge, lower_bound, p_value, paired
from dapcal.experiments.page.no_harm import no_harm_page, write
from dapcal.experiments.page.no_harm_worst import WHY
from dapcal.experiments.records import Run
from dapcal.ranks import auroc

ROOT = Path(__file__).parent.parent

# The cases


def test_there_are_thirty_cases_and_more_and_every_posterior_has_several_kinds_of_data():
    plan = Plan()
    assert len(plan.cases) >= 30
    assert len({case.name for case in plan.cases}) == len(plan.cases)
    kinds = Counter(
        (posterior, kind)
        for posterior in POSTERIORS
        for kind in {plan.of(case.data)["kind"] for case in plan.cases if case.posterior == posterior}
    )
    least = {posterior: 2 if posterior == "table ensemble" else 3 for posterior in POSTERIORS}
    assert all(sum(own == posterior for own, _ in kinds) >= least[posterior] for posterior in POSTERIORS)
    assert {plan.of(case.data)["kind"] for case in plan.cases} == set(KINDS)
    assert all(len(case.seeds) >= 5 for case in plan.cases)
    (first,) = (case for case in plan.cases if case.name == "digits: one network")
    assert len(first.seeds) == 10


def test_cases_are_chosen_by_parts_of_their_names():
    plan = Plan()
    assert [case.name for case in plan.chosen(("digits: one",), 2)] == ["digits: one network"]
    assert plan.chosen(("digits: one",), 2)[0].seeds == (0, 1)
    with pytest.raises(ValueError, match="Expected parts of the names of cases, got nothing like it"):
        plan.chosen(("nothing like it",), None)


# Outliers


def test_a_moved_row_differs_in_one_column_by_four_deviations():
    generator = torch.Generator().manual_seed(0)
    train = torch.randn(50, 4, generator=generator) * torch.tensor([1.0, 5.0, 1.0, 2.0])
    train[:, 2] = (train[:, 2] > 0).float()  # says yes or no: never moved
    x = train[:20]
    change = CORRUPTED["one column moved"](x, train, generator) - x
    assert ((change != 0).sum(1) == 1).all()
    assert not change[:, 2].any()
    moved = (change / train.std(0)).abs().amax(1)
    assert torch.allclose(moved, torch.full((20,), MOVED), atol=1e-4)


def test_an_exchanged_row_has_two_standardised_values_in_each_others_place():
    generator = torch.Generator().manual_seed(0)
    train = 3 + torch.randn(50, 4, generator=generator) * torch.tensor([1.0, 5.0, 0.1, 2.0])
    standard = (train - train.mean(0)) / train.std(0)
    changed = CORRUPTED["two columns exchanged"](train, train, generator)
    after = (changed - train.mean(0)) / train.std(0)
    assert ((after - standard).abs() > 1e-3).sum(1).max() == 2
    assert torch.allclose(after.sort(1).values, standard.sort(1).values, atol=1e-3)


def test_parts_share_no_row_and_classes_left_out_are_outliers_alone():
    given = problem(
        {"kind": "digits", "without": [3, 8], "outliers": ["other classes"], "test": 0.25, "held_out": 0.2}, seed=1
    )
    rows = torch.cat([part.x for part in (given.train, given.held_out, given.test)])
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    kept = torch.from_numpy(x[(y != 3) & (y != 8)] / 16).float()
    assert torch.equal(rows.unique(dim=0), kept.unique(dim=0))
    assert len(rows) == len(kept)
    assert len(given.outliers["other classes"].x) == int(((y == 3) | (y == 8)).sum())
    assert given.train.y.unique().tolist() == list(range(8))
    assert given.outputs == 8


# Statistics


def test_paired_differences_agree_with_scipy():
    values = [0.01, 0.03, -0.02, 0.05, 0.04]
    one = paired(values)
    test = stats.ttest_1samp(values, 0.01, alternative="greater")
    assert p_value(one, 0.01) == pytest.approx(test.pvalue)
    assert lower_bound(one, 0.05) == pytest.approx(test.confidence_interval(0.95).low)
    assert one.error == pytest.approx(stats.sem(values))
    assert paired([0.2], row_error=0.1) == Paired(0.2, 0.1, math.inf)
    assert p_value(paired([0.2], 0.1), 0.0) == pytest.approx(stats.norm.sf(2.0))


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_case_is_harmed_where_its_bound_lies_beyond_the_limit():
    found = [Paired(0.05, 0.005, 9), Paired(0.03, 0.009, 9), Paired(-0.1, 0.01, 9), Paired(0.012, 0.0, 4)]
    judged = judge(found, limit=0.01)
    assert [one.harmed for one in judged] == [True, False, False, True]
    assert [one.bound > 0.01 for one in judged] == [True, False, False, True]
    alone = judge([found[1]], limit=0.01)[0]
    assert alone.harmed  # at 5 % on its own, p = 0.026
    assert judged[1].p_value == pytest.approx(2 * alone.p_value)


def test_harm_that_is_only_noise_is_found_in_at_most_one_family_in_twenty():
    generator = torch.Generator().manual_seed(0)
    families = torch.randn(400, 10, 5, generator=generator, dtype=torch.float64).tolist()
    wrong = sum(any(one.harmed for one in judge([paired(case) for case in family], 0.0)) for family in families)
    assert wrong / 400 <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 400)


def test_the_bootstrap_error_of_an_auroc_difference_is_that_of_fresh_rows():
    generator = torch.Generator().manual_seed(0)

    def fresh() -> list[tuple[torch.Tensor, torch.Tensor]]:
        near, far = torch.randn(200, generator=generator), 1 + torch.randn(150, generator=generator)
        return [
            (near, far),
            (near + torch.randn(200, generator=generator), far + torch.randn(150, generator=generator)),
        ]

    found = [measuring.bootstrap_error(fresh(), seed, 200) for seed in range(5)]
    repeats = [[auroc(far, near) for near, far in fresh()] for _ in range(500)]
    true = float(torch.tensor([after - before for before, after in repeats], dtype=torch.float64).std())
    assert sum(found) / 5 == pytest.approx(true, rel=0.15)
    same = fresh()[0]
    assert measuring.bootstrap_error([same, same], 0) == 0.0


# From data to page

TINY = {
    **{name: value for name, value in Plan().settings.items() if name not in ("data", "cases")},
    "seeds": [0, 1], "steps": 64, "members": 2, "draws": 5, "recipe": {"epochs": 2, "members": 2},
    "data": {
        "moons": {"kind": "moons", "hidden": [8], "outliers": ["around"]},
        "waves": {"kind": "sinusoid", "hidden": [8], "outliers": ["between the clusters", "beyond the clusters"]},
    },
    "cases": [
        {"data": "moons", "posteriors": ["one network"]},
        {"data": "waves", "posteriors": ["ensemble"], "seeds": [0]},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> dict:
    work = tmp_path_factory.mktemp("work")
    found = run_plan(Plan(TINY), Run(work)).numbers
    return json.loads(json.dumps(found))


def test_a_tiny_plan_runs_end_to_end(numbers: dict):
    assert list(numbers["cases"]) == ["moons: one network", "waves: ensemble"]
    assert [record["seed"] for record in numbers["cases"]["moons: one network"]] == [0, 1]
    (record,) = numbers["cases"]["waves: ensemble"]
    assert record["rows"] == [1000, 500, 1000]
    assert {"nll", "rmse", "coverage"} == set(record["before"]) == set(record["after"])
    assert math.isfinite(record["phi"])
    assert record["spaces"]
    assert set(record["outliers"]) == {"between the clusters", "beyond the clusters"}
    assert numbers["verdict"]["nll"]["tested"] == 2
    assert numbers["verdict"]["auroc"]["tested"] == 3
    assert numbers["settings"]["not_blind"] == Plan().settings["not_blind"]
    assert numbers["environment"]["torch"] == torch.__version__


def test_before_is_the_network_itself():
    data = Plan(TINY).of("moons")
    record = measuring.measure(data, "one network", 0)
    assert record["before"]["nll"] == pytest.approx(record["network"]["nll"], abs=1e-6)


def test_one_network_with_one_noise_level_tells_nothing_apart():
    record = measuring.measure(Plan(TINY).of("waves"), "one network", 0)
    assert [own["before"] for own in record["outliers"].values()] == [
        {"auroc": 0.5, "fpr95": 1.0, "nll": pytest.approx(own["before"]["nll"])} for own in record["outliers"].values()
    ]


@pytest.mark.parametrize("posterior", ["MC dropout", "last-layer Laplace", "VI", "SWAG", "table ensemble"])
def test_every_posterior_is_measured(posterior: str):
    record = measuring.measure(Plan(TINY).of("moons"), posterior, 0)
    assert all(math.isfinite(record[side]["nll"]) for side in ("before", "after", "network"))


def test_an_interrupted_run_goes_on_from_what_is_finished(numbers: dict, tmp_path: Path, monkeypatch):
    done = copy.deepcopy(numbers["cases"]["moons: one network"][0])
    done["phi"] = 123.0
    (tmp_path / "moons-one-network-0.json").write_text(json.dumps(done))
    measured = []

    def watched(data, posterior, seed):
        measured.append((posterior, seed))
        return numbers["cases"][f"{data['name']}: {posterior}"][seed]

    monkeypatch.setattr("dapcal.experiments.no_harm.experiment.measure", watched)
    found = run_plan(Plan(TINY), Run(tmp_path)).numbers
    assert measured == [("one network", 1), ("ensemble", 0)]
    assert found["cases"]["moons: one network"][0]["phi"] == 123.0


def made_up(before: list[float], after: list[float], auroc_after: float = 0.9) -> list[dict]:
    return [
        {
            "seed": seed, "rows": [10, 5, 5], "notes": ["noted."], "phi": -1.0, "adjust": "Inflate",
            "spaces": ["inputs"],
            "before": {"nll": b, "accuracy": 0.9, "ece": 0.1}, "after": {"nll": a, "accuracy": 0.9, "ece": 0.1},
            "row_errors": {"nll": 0.02},
            "network": {"nll": b},
            "outliers": {
                "far": {
                    "before": {"auroc": 0.9, "fpr95": 0.3}, "after": {"auroc": auroc_after - seed / 1000, "fpr95": 0.3},
                    "row_errors": {"auroc": 0.01},
                }
            },
            "seconds": {"training": 1.0},
        }
        for seed, (b, a) in enumerate(zip(before, after, strict=True))
    ]  # fmt: skip


def test_differences_and_verdict_by_hand():
    records = {
        "digits: one network": made_up([0.1, 0.2, 0.3], [0.09, 0.19, 0.29]),
        "b: VI": made_up([0.1, 0.1, 0.1], [0.3, 0.301, 0.299], auroc_after=0.7),
        "c: VI": made_up([0.5], [0.52]),
    }
    found = {(one.case, one.column): one for one in differences(records)}
    one = found["b: VI", "nll"]
    assert (one.before, one.after, one.harm.mean) == pytest.approx((0.1, 0.3, 0.2))
    assert one.harm.error == pytest.approx(stats.sem([0.2, 0.201, 0.199]))
    assert found["c: VI", "nll"].harm == pytest.approx((0.02, 0.02, math.inf))
    assert found["c: VI", "auroc"].harm.error == pytest.approx(1.0)
    assert found["b: VI", "auroc"].harm.mean == pytest.approx(20.1)
    given = verdict(records)
    assert given["nll"]["harmed"] == ["b: VI"]
    assert given["auroc"]["harmed"] == ["b: VI (far)"]
    assert given["nll"]["mean beyond the limit"] == ["b: VI", "c: VI"]
    assert given["auroc"]["mean harm"] == pytest.approx((0.1 + 20.1 + 0.0) / 3)
    assert given["nll"]["mean harm"] == pytest.approx((-0.01 + 0.2 + 0.02) / 3)
    assert not given["nll"]["passes"]
    assert given["digits: one network"]["passes"]


def test_the_page_names_worst_cases_and_changes_that_were_not_blind(numbers: dict, tmp_path: Path):
    records = {"b: VI": made_up([0.1, 0.1, 0.1], [0.3, 0.301, 0.299]), **numbers["cases"]}
    settings = numbers["settings"] | {"not_blind": [{"change": "A default moved.", "seen": "b: VI."}]}
    found = numbers | {"cases": records, "verdict": verdict(records), "settings": settings}
    (tmp_path / "no-harm.json").write_text(json.dumps(found))
    page = no_harm_page(tmp_path)
    assert (
        "- **NLL (nats)**: b: VI, 0.100 → 0.300 (+0.200 ± 0.001). Not looked into yet. (Inflate, φ −1.00" in page.text
    )
    assert "- A default moved. Seen before: b: VI." in page.text
    assert "**NLL: does not pass.**" in page.text
    assert "0.100 → 0.300 (+0.200 ± 0.001) ▼" in page.text
    write(tmp_path, tmp_path)
    assert (tmp_path / "no-harm.md").read_text(encoding="utf-8") == page.text
    assert (tmp_path / "no-harm-differences.png").stat().st_size > 1000


def test_what_doubt_costs_on_easy_classes_is_told(numbers: dict, tmp_path: Path):
    easy = {"easy: VI": made_up([0.01, 0.02], [0.03, 0.04]), "easy: SWAG": made_up([0.05, 0.05], [0.05, 0.05])}
    for records in easy.values():
        for one in records:
            one["before"]["accuracy"] = 0.98
    records = {"hard: VI": made_up([0.1, 0.1], [0.3, 0.3]), **easy}
    (tmp_path / "no-harm.json").write_text(json.dumps(numbers | {"cases": records, "verdict": verdict(records)}))
    text = no_harm_page(tmp_path).text
    assert "right before, or more: 2 cases) the NLL rises in 1, by +0.010 ± 0.010 nats on average" in text


def test_the_worst_case_of_every_column_is_explained():
    every = differences(json.loads((ROOT / "results" / "no-harm.json").read_text(encoding="utf-8"))["cases"])
    for column in {one.column for one in every}:
        worst = max((one for one in every if one.column == column), key=lambda one: one.harm.mean)
        if worst.harm.mean > 0:
            assert (column, worst.name) in WHY, "look into it"
    assert "Not looked into" not in (ROOT / "docs" / "no-harm.md").read_text(encoding="utf-8")


def test_the_page_is_made_from_the_results():
    text = (ROOT / "docs" / "no-harm.md").read_text(encoding="utf-8")
    assert no_harm_page(ROOT / "results").text == text, "run `make page`"
