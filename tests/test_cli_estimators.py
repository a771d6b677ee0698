"""`dapcal fit --estimator`: a forest or boosting model of one's own, from the table to the service, without pickle."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pyarrow.csv
import pytest
import torch

from artefact_bytes import opened, sealed
from dapcal.models import load
from dapcal.models.table import TableModel
from dapcal.posteriors.trees import TreePosterior
from dapcal.serve import Served, create_app
from table_cases import refused, run, write_rows

OWN = """
import sys
from sklearn.ensemble import *
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.tree import DecisionTreeRegressor

def forest():
    return RandomForestRegressor(12, min_samples_leaf=3, random_state=0)

def boosted():
    return HistGradientBoostingRegressor(max_iter=15)

def several():
    return [GradientBoostingRegressor(n_estimators=8, subsample=0.5, random_state=seed) for seed in range(3)]

def classes():
    return ExtraTreesClassifier(12, min_samples_leaf=3)

def boosted_classes():
    return GradientBoostingClassifier(n_estimators=8)

def bag():
    return BaggingRegressor(DecisionTreeRegressor(min_samples_leaf=3), 8, max_features=0.7)

def linear():
    return LinearRegression()

def fitted():
    return forest().fit([[0.0], [1.0]], [0.0, 1.0])

def the_class():
    return RandomForestRegressor

def lonely():
    return RandomForestRegressor(1)

def quantile():
    return GradientBoostingRegressor(loss="quantile")

def bagged_quantile():
    return BaggingRegressor(quantile())

def bagged_lines():
    return BaggingRegressor(LinearRegression())

def counts():
    return HistGradientBoostingRegressor(loss="poisson")

def nothing():
    return []

def fails():
    raise RuntimeError("no licence")

number = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Tables, a module of estimators, and forest.dap."""
    place = tmp_path_factory.mktemp("estimators")
    write_rows(place / "train.csv", 240)
    write_rows(place / "new.csv", 30, seed=1, target=False)
    (place / "own_trees.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "path", list(sys.path))
        done = run("fit", "train.csv", "--target", "price", "--estimator", "own_trees:forest", "-o", "forest.dap")
    assert done.exit_code == 0, done.output
    return place


@pytest.fixture
def there(folder: Path, monkeypatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return folder


def fit(name: str, *options: object, target: str = "price", out: str = "m.dap"):
    return run("fit", "train.csv", "--target", target, "--estimator", f"own_trees:{name}", "-o", out, *options)


async def asked(app, row: dict) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        return await client.post("/predict", json=row)


def trees_of(model: TableModel) -> TreePosterior:
    posterior = model.calibrated.posterior
    assert isinstance(posterior, TreePosterior)
    return posterior


def test_draws_are_the_trees_of_the_forest_fitted_to_the_encoded_rows(there: Path):
    """The same forest, fitted here to the rows that are not held out to judge, predicts the same numbers."""
    from sklearn.ensemble import RandomForestRegressor

    model = load("forest.dap")
    assert isinstance(model, TableModel)
    assert trees_of(model).count == 12
    before = model.calibrated.before
    assert isinstance(before, TreePosterior)
    rows = model.inputs(there / "new.csv", 30)
    own = RandomForestRegressor(12, min_samples_leaf=3, random_state=0)
    own.fit(model.train.x.numpy(), model.train.y[:, 0].double().numpy())
    np.testing.assert_allclose(before.outputs(rows).mean(0)[:, 0], own.predict(rows.numpy()), atol=1e-6)
    chosen = model.held_out.subset(model.calibrated.chooses)
    joined = [torch.cat([getattr(part, side) for part in (model.train, chosen)]) for side in ("x", "y")]
    own.fit(joined[0].numpy(), joined[1][:, 0].double().numpy())
    expected = model.unit.means(own.predict(rows.numpy()))
    found = model.columns(rows)["prediction"].ravel()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("boosted", ["--fast"], 5),
        ("several", ["--fast", "--points", "40", "--seed", "3"], 3),
        ("bag", ["--log"], 8),
        ("forest", ["--fast", "--weight", "area", "--bounds", "0,1000", "--validation", "0.3"], 12),
    ],
)
def test_every_kind_goes_from_fit_to_predict(there: Path, name, options, count):
    done = fit(name, *options, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert any(note.startswith("draws: ") for note in told["calibration"])
    assert (told["gaps"] is None) == ("--fast" in options)
    assert told["value"] < told["constant"]
    assert trees_of(load("m.dap")).count == count
    assert run("predict", "m.dap", "new.csv", "-o", "out.csv").exit_code == 0
    table = pyarrow.csv.read_csv("out.csv")
    lower, prediction, upper = (table[name].to_numpy() for name in ("lower", "prediction", "upper"))
    assert (lower < prediction).all()
    assert (prediction < upper).all()


@pytest.mark.parametrize("name", ["classes", "boosted_classes"])
def test_classes_have_probabilities(there: Path, name):
    done = fit(name, "--class-weight", "balanced", "--json", target="city")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["value"] > told["constant"]
    assert run("predict", "m.dap", "train.csv", "-o", "out.csv").exit_code == 0
    table = pyarrow.csv.read_csv("out.csv")
    np.testing.assert_allclose(table["probability_Rome"].to_numpy() + table["probability_Oslo"].to_numpy(), 1)


def test_explain_report_serve_and_doctor_take_the_file(there: Path):
    explained = run("explain", "forest.dap", "new.csv", "--row", 2)
    assert explained.exit_code == 0, explained.output
    assert "training row at" in explained.stdout
    reported = run("report", "forest.dap", "--data", "new.csv", "-o", "report.html")
    assert reported.exit_code == 0, reported.output
    assert "the 12 members of RandomForestRegressor" in (there / "report.html").read_text()
    assert run("doctor", "forest.dap").exit_code == 0
    model = load("forest.dap")
    row = {"area": 80.0, "rooms": 3, "city": "Rome"}
    answer = asyncio.run(asked(create_app(Served.of(model, "forest.dap")), row))
    assert answer.status_code == 200, answer.text
    assert answer.json()["prediction"] == pytest.approx(model.columns(model.encode([row]))["prediction"][0])


def test_another_process_predicts_the_same_without_scikit_learn_and_the_module(there: Path, tmp_path: Path):
    assert run("predict", "forest.dap", "new.csv", "-o", "here.csv").exit_code == 0
    code = (
        "import pickle, sys; sys.modules['sklearn'] = pickle.load = pickle.loads = None; "
        "from dapcal.cli import app; app()"
    )
    words = ["predict", there / "forest.dap", there / "new.csv", "-o", tmp_path / "there.csv"]
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "there.csv").read_bytes() == (there / "here.csv").read_bytes()


def test_the_same_seed_gives_the_same_file(there: Path):
    for out in ("one.dap", "two.dap"):
        assert fit("boosted", "--fast", "--seed", 5, out=out).exit_code == 0
    assert Path("one.dap").read_bytes() == Path("two.dap").read_bytes()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_trees:linear", ["LinearRegression", "dapcal.adapters.estimators.from_estimators"]),
        ("own_trees:classes", ["ExtraTreesClassifier predicts classes", "regressor"]),
        ("own_trees:fitted", ["not fitted"]),
        ("own_trees:the_class", ["RandomForestRegressor()"]),
        ("own_trees:lonely", ["two trees or more"]),
        ("own_trees:quantile", ["quantile"]),
        ("own_trees:bagged_quantile", ["quantile"]),
        ("own_trees:bagged_lines", ["BaggingRegressor cannot be stored", "from_estimators"]),
        ("own_trees:counts", ["could not be fitted", "poisson"]),
        ("own_trees:nothing", ["an empty list"]),
        ("own_trees:fails", ["no licence"]),
        ("own_trees:number", ["returns an estimator"]),
        ("own_trees:absent", ["There is no absent in own_trees"]),
        ("absent_module:make", ["There is no module absent_module"]),
        ("own_trees.py:forest", ["package.module:factory"]),
        ("json:dumps", ["json:dumps failed"]),
        ("own_trees:sys.getrecursionlimit", ["an estimator with `fit`"]),
    ],
)
def test_what_is_no_estimator_is_refused_in_a_sentence(there: Path, name, words):
    done = run("fit", "train.csv", "--target", "price", "--estimator", name, "-o", "no.dap", "--quiet")
    refused(done, *words)
    assert not Path("no.dap").exists()


@pytest.mark.parametrize("option", [("--posterior", "ensemble"), ("--hidden", "8"), ("--epochs", "4")])
def test_options_of_networks_are_refused(there: Path, option):
    refused(fit("forest", *option), option[0], "leave it out")


def test_the_posterior_has_no_name_without_an_estimator(there: Path):
    refused(run("fit", "train.csv", "--target", "price", "--posterior", "estimator", "-o", "no.dap"), "--estimator")


# Files that were changed by others


CHANGES = {
    "a cycle": ("child", lambda t: t.index_fill(0, torch.tensor([1]), 1)),
    "a child out of range": ("child", lambda t: t.index_fill(0, torch.tensor([0]), 10**9)),
    "a child below 0": ("child", lambda t: t.index_fill(0, torch.tensor([0]), -5)),
    "a leaf more": ("child", lambda t: t.index_fill(0, torch.tensor([0]), 0)),
    "an input that no row has": ("feature", lambda t: t.index_fill(0, torch.tensor([0]), 99)),
    "an input below 0": ("feature", lambda t: t.index_fill(0, torch.tensor([0]), -1)),
    "places of another type": ("feature", lambda t: t.long()),
    "fewer nodes": ("feature", lambda t: t[:-1]),
    "fewer thresholds": ("threshold", lambda t: t[:-1]),
    "thresholds that are whole": ("threshold", lambda t: t.int()),
    "directions that are numbers": ("missing_right", lambda t: t.float()),
    "fewer values": ("value", lambda t: t[:-1]),
    "more outputs": ("value", lambda t: t.repeat(1, 3)),
    "values of another type": ("value", lambda t: t.float()),
    "a root out of range": ("root", lambda t: t + 10**6),
    "no roots": ("root", lambda t: t[:0]),
    "a draw out of range": ("draw", lambda t: t + 1),
    "a draw below 0": ("draw", lambda t: t - 1),
    "an output out of range": ("output", lambda t: t + 1),
    "no draws": ("start", lambda t: t[:0]),
    "one number": ("start", lambda t: t[0, 0]),
}


@pytest.mark.parametrize("posterior", ["posterior", "before"])
@pytest.mark.parametrize("change", CHANGES)
def test_trees_that_were_changed_are_refused(there: Path, tmp_path: Path, change, posterior):
    description, tensors = opened((there / "forest.dap").read_bytes())
    name, changed = CHANGES[change]
    key = f"calibrated.{posterior}.forest.{name}"
    tensors[key] = changed(tensors[key])
    (tmp_path / "changed.dap").write_bytes(sealed(description, tensors))
    refused(run("predict", tmp_path / "changed.dap", "new.csv", "-o", tmp_path / "out.csv"), "save it again")


@pytest.mark.parametrize("field", [("link", "roots"), ("smoothing", {"float": (0.0).hex()}), ("forest", None)])
def test_parts_that_were_changed_are_refused(there: Path, tmp_path: Path, field):
    description, tensors = opened((there / "forest.dap").read_bytes())
    description["tree"]["fields"]["posterior"]["fields"][field[0]] = field[1]
    (tmp_path / "changed.dap").write_bytes(sealed(description, tensors))
    refused(run("predict", tmp_path / "changed.dap", "new.csv", "-o", tmp_path / "out.csv"), "save it again")


def test_a_file_of_networks_that_says_it_is_of_trees_is_refused(there: Path, houses: Path, tmp_path: Path):
    description, tensors = opened((houses / "house.dap").read_bytes())
    description["about"]["recipe"]["posterior"] = "estimator"
    (tmp_path / "changed.dap").write_bytes(sealed(description, tensors))
    done = run("predict", tmp_path / "changed.dap", there / "new.csv", "-o", tmp_path / "out.csv")
    refused(done, "changed.dap", "save it again")
