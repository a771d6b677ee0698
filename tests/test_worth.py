"""A model that says no more of its target than looking at no column does is told to be so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

from dapcal.models.table_fitting import fit
from dapcal.models.worth import note
from dapcal.recipes import Recipe
from table_cases import run

RECIPE = Recipe(fast=True, members=2, hidden=(16,), epochs=20)
NO_BETTER = "predicted no better than by looking at no column"


def rows(kind: str, n: int = 300, seed: int = 0) -> pa.Table:
    """Two columns, and a target that has nothing to do with them, or a lot."""
    random = np.random.default_rng(seed)
    a, b = random.normal(size=n), random.normal(size=n)
    target = {
        "noise": random.normal(5, 2, n),
        "noisy classes": random.choice(["no", "yes"], n, p=[0.6, 0.4]),
        "amounts": np.exp(random.normal(0, 1.5, n)),
        "line": 3 * a + random.normal(size=n),
        "classes": np.where(a + 0.3 * random.normal(size=n) > 0.3, "yes", "no"),
        "rare": np.where(a + 2 * random.normal(size=n) > 3.5, "yes", "no"),
    }
    return pa.table({"a": a, "b": b, "y": target[kind]})


def told(table: pa.Table, **options) -> list[str]:
    return [text for text in fit(table, "y", recipe=RECIPE, **options).notes if NO_BETTER in text]


@pytest.mark.parametrize("kind", ["noise", "noisy classes"])
@pytest.mark.parametrize("seed", range(2))
def test_noise_is_told(kind, seed):
    (text,) = told(rows(kind, seed=seed))
    assert "on 30 rows that judge it: NLL " in text
    assert " against " in text


@pytest.mark.parametrize("kind", ["line", "classes"])
@pytest.mark.parametrize("seed", range(2))
def test_what_columns_say_is_no_reason(kind, seed):
    assert told(rows(kind, seed=seed)) == []


def test_logarithms_are_compared_with_logarithms():
    """Beside a Gaussian any log-normal would be good at amounts like these."""
    (text,) = told(rows("amounts", 1500), log=True)
    assert "NLL" in text.split("; its")[0]


def test_probabilities_may_say_more_than_the_most_frequent_class():
    model = fit(rows("rare", 1200), "y", recipe=RECIPE)
    accuracy, probabilities = (model.halves()[1].y == 0).double().mean(), model.calibrated.judging(model.halves()[1].x)
    assert (probabilities.mean.argmax(-1) == 0).double().mean() > 0.95
    text = note(model)
    if text is not None:
        assert f"against {100 * float(accuracy):.1f} %" in text
        assert "; its NLL" in text


def test_too_few_judges_say_nothing():
    model = fit(rows("noise"), "y", recipe=RECIPE)
    judges = model.calibrated.judges[:1]
    few = replace(model, calibrated=replace(model.calibrated, judges=judges))
    assert note(model) is not None
    assert len(few.halves()[1].x) < 2
    assert note(few) is None


def test_the_command_line_says_it_and_so_does_json(tmp_path: Path):
    small = ["--fast", "--epochs", "20", "--hidden", "16"]
    for kind, expected in (("noise", True), ("line", False)):
        pa.csv.write_csv(rows(kind), tmp_path / "train.csv")
        command = ["fit", tmp_path / "train.csv", "--target", "y", "-o", tmp_path / "model.dap", *small]
        result = run(*command)
        assert (NO_BETTER in " ".join(result.stderr.split())) == expected
        data = json.loads(run(*command, "--json").stdout)
        assert any(NO_BETTER in text for text in data["notes"]) == expected
