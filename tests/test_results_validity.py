"""The committed results on p-values and on the combination of evidence keep what is promised of them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from dapcal.calibration.ood_score import fit_evidence

RESULTS = Path(__file__).parent.parent / "results"


def found(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def excesses(way: str, refit: str, *pieces: str) -> list[float]:
    """(share − α)/error of every number of some pieces (all, where none is named)."""
    results = found(f"validity-{way}")
    assert results["splits"] >= 500
    return [
        (share - level) / error
        for case, told in results["shares"].items()
        if case.endswith(f"refit {refit}")
        for piece, numbers in told.items()
        if not pieces or piece in pieces
        for level, share, error in zip(results["levels"], numbers["share"], numbers["error"], strict=True)
        if error > 0
    ]


def test_p_values_hold():
    """Of so many numbers a few lie two standard errors above α by chance; none lies three above."""
    values = excesses("batched", "off")
    assert len(values) == 160  # 2 tasks × 5 pieces × 16 levels that so many rows can reach
    values += excesses("calibrate", "off") + excesses("recipe", "on")
    above = sum(value > 2 for value in values)
    assert above <= 0.05 * len(values)
    assert max(values) < 3
    page = " ".join((RESULTS.parent / "docs" / "method-calibration.md").read_text(encoding="utf-8").split())
    assert f"{above} of {len(values)} numbers lie more than two standard errors above it" in page
    assert f"none more than {max(values):.1f}" in page


def test_members_that_were_trained_again_would_leave_the_score_and_distances_valid_and_not_doubt():
    """Why p-values come from those before."""
    assert max(excesses("batched", "on", "score", "features", "inputs", "normalised features")) <= 2
    assert max(excesses("batched", "on", "doubt")) > 3


def test_the_weighed_sum_has_the_best_mean_the_least_regret_and_no_worse_worst_case():
    told = found("evidence-combination")["summary"]
    ours = told["weighed sum"]
    assert ours["mean"] == max(row["mean"] for row in told.values())
    assert ours["mean regret"] == min(row["mean regret"] for row in told.values())
    best = max(row["worst"] for row in told.values())
    assert ours["worst"] == pytest.approx(best, abs=ours["worst, error over seeds"])
    assert ours["worst"] > told["sum"]["worst"]
    assert ours["largest regret"] < told["sum"]["largest regret"]


def test_the_page_says_what_the_weighed_sum_costs_where_doubt_alone_tells():
    numbers = found("evidence-combination")
    ours, safer = (numbers["summary"][each] for each in ("weighed sum", "doubt or distances"))
    assert safer["largest loss"] < ours["largest loss"] / 2
    page = " ".join((RESULTS.parent / "docs" / "method-calibration.md").read_text(encoding="utf-8").split())
    assert f"On {len(numbers['auroc'])} cases" in page
    assert f"In {ours['cases lost']} of the {len(numbers['auroc'])} cases" in page
    assert f"at most {ours['largest loss']:.2f} (ones, MNIST)" in page
    assert ours["lost"] == "MNIST, class 1"
    assert f"stays within {safer['largest loss']:.2f} of doubt, but its mean is {safer['mean']:.3f}" in page
    assert len(numbers["summary"]) == 12
    assert f"best of twelve combinations, {ours['mean']:.3f}" in page


def test_the_batched_way_judges_the_librarys_score(monkeypatch):
    """The weighed sum."""
    path = RESULTS.parent / "benchmarks" / "validity.py"
    spec = importlib.util.spec_from_file_location("validity_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    validity = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, validity)
    spec.loader.exec_module(validity)
    found = []

    def fitted(*arguments):
        found.append(fit_evidence(*arguments))
        return found[-1]

    monkeypatch.setattr(validity, "fit_evidence", fitted)
    monkeypatch.setattr(validity, "SPLITS", 2)
    next(validity.with_batched())
    weights = [evidence.weights for evidence in found]
    assert len(weights) == 2
    assert all(own is not None and own.shape == (4,) and float(own.max()) == 1 for own in weights)
    assert any(float(own.min()) < 1 for own in weights), "the plain sum is another score"
