"""Both kinds of model behind one protocol: loaded from one look at the file, asked by the same commands."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import dapcal.serve
import previous_cases
from dapcal import container
from dapcal.cli import app
from dapcal.data import Labelled
from dapcal.models import Model, load, network
from dapcal.models.columns import Unit, in_unit
from dapcal.models.model import Reading
from dapcal.models.network_fitting import fit
from previous_cases import FOLDER

TABLE, NETWORK = FOLDER / "table-classification.dap", FOLDER / "network.dap"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder with the network's code, its inputs, and a table."""
    (tmp_path / "previous_nets.py").write_text("from previous_cases import smooth as make\n")
    np.savez(tmp_path / "new.npz", x=previous_cases.inputs().numpy())
    (tmp_path / "new.csv").write_text("id,area,city\n1,70,Rome\n2,900,Lima\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("previous_nets", None)


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def given(kind: str) -> tuple[Path, str, list[str]]:
    """A model, data for it, and what else its commands need."""
    return (TABLE, "new.csv", []) if kind == "table" else (NETWORK, "new.npz", ["--model", "previous_nets:make"])


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("kind", ["table", "network"])
@pytest.mark.parametrize("command", ["predict", "report", "explain", "serve"])
def test_a_command_reads_its_artefact_once(command: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    reads, digests = [], []
    honest, hashed = container.read, container.Content.check
    monkeypatch.setattr(container, "read", lambda path, *rest: reads.append(path) or honest(path, *rest))
    monkeypatch.setattr(container.Content, "check", lambda content: digests.append(1) or hashed(content))
    monkeypatch.setattr(dapcal.serve, "run", lambda *arguments, **named: None)
    model, data, options = given(kind)
    arguments = {
        "predict": [data, "-o", "out.csv"],
        "report": ["--data", data, "-o", "out.html"],
        "explain": [data],
        "serve": [],
    }[command]
    result = run(command, model, *arguments, *options, "--quiet")
    assert result.exit_code == 0, result.output
    assert (len(reads), len(digests)) == (1, 1)


@pytest.mark.usefixtures("project")
def test_predict_and_score_write_the_same_of_a_network():
    _, data, options = given("network")
    for command in ("predict", "score"):
        result = run(command, NETWORK, data, *options, "-o", f"{command}.csv", "--json")
        assert result.exit_code == 0, result.output
    assert Path("predict.csv").read_text() == Path("score.csv").read_text()
    with Path("predict.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = previous_cases.expected("network")
    assert [row["prediction"] for row in rows] == wanted["prediction"]
    assert list(rows[0]) == [
        "index", "prediction", "probability_a", "probability_b", "probability_c", "epistemic", "aleatoric", "distance",
        "ood_score", "ood_p_value", "ood", "reason",
    ]  # fmt: skip


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("table", ["--model", "previous_nets:make"], "is a table's model and needs no --model"),
        ("table", ["--batch-size", "9"], "A table's model takes no --batch-size"),
        ("table", ["--resize", "--mean", "0.5"], "A table's model takes no --resize, --mean"),
        ("network", ["--keep", "id"], "--keep copies columns of a table"),
        ("network", ["--std", "0.5"], "--std are for folders of images"),
    ],
)
def test_options_of_the_other_kind_are_refused(kind: str, options: list[str], words: str):
    model, data, needed = given(kind)
    result = run("predict", model, data, "-o", "out.csv", *needed, *options, "--quiet")
    assert result.exit_code == 2
    assert words in result.stderr
    assert not Path("out.csv").exists()


@pytest.mark.parametrize("kind", ["table", "network"])
def test_both_kinds_give_the_same_names(kind: str):
    model: Model = load(TABLE) if kind == "table" else load(NETWORK, previous_cases.smooth())
    row = {"area": 70.0, "city": "Rome"} if kind == "table" else {"x": [0.0, 1.0]}
    columns = model.columns(model.encode([row, row]))
    names = ["prediction", "probability", "epistemic", "aleatoric", "distance", "ood_score", "ood_p_value", "ood"]
    cells = ["missing", "unusual"] if kind == "table" else []
    assert list(columns) == [*names, "reason", *cells]
    assert columns["probability"].shape == (2, len(model.classes))
    assert set(columns["prediction"]) <= set(model.classes)
    assert set(row) == {field.name for field in model.fields()}


def test_a_reading_names_what_was_given():
    assert Reading().given("keep", "batch_size") == ""
    assert Reading(keep=("a",), mean=(0.0,)).given("batch_size", "mean", "keep") == "--mean, --keep"


@pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")  # few held-out inputs are wrong
def test_a_sample_of_the_held_out_data_knows_which_of_it_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(network, "KEPT_HELD_OUT", 30)
    x = torch.randn(210, 2, generator=torch.Generator().manual_seed(0))
    data = Labelled(x, (x.sum(1) > 0).long())
    held_out = data.subset(torch.arange(120, 210))

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))

    fit([make()], data.subset(torch.arange(120)), held_out).save(tmp_path / "m.dap")
    model = load(tmp_path / "m.dap", make())
    rows = model.subject("m").judging
    assert rows is not None
    judges = held_out.x[model.calibrated.judges]
    is_judge = (model.subject("m").held_out.x[:, None] == judges).all(-1).any(1)
    assert rows.tolist() == is_judge.nonzero().flatten().tolist()
    assert 0 < len(rows) < 30


def test_a_unit_moves_and_scales_amounts_and_scales_widths_alone():
    rng = np.random.default_rng(0)
    columns = {name: rng.normal(size=(4, 1)).astype("float32") for name in ("prediction", "lower", "upper")}
    columns |= {name: rng.random((4, 1)).astype("float32") for name in ("epistemic", "aleatoric", "distance")}
    shown = in_unit(columns, Unit(300.0, 80.0))
    assert list(shown) == list(columns)
    for name in ("prediction", "lower", "upper"):
        np.testing.assert_allclose(shown[name], 300 + 80 * columns[name], rtol=1e-6)
        assert shown[name].dtype == np.float64
    for name in ("epistemic", "aleatoric"):
        np.testing.assert_allclose(shown[name], 80 * columns[name], rtol=1e-6)
    assert shown["distance"] is columns["distance"]
    assert Unit(1.0, -2.0).amounts([3.0]) == [-5.0]
    assert Unit(1.0, -2.0).widths((3.0,)) == [6.0]  # as a width is never negative
