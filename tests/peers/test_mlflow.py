"""The MLflow flavour: a folder of the artefact as it is, no pickle in it; MLflow predicts as dapcal does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import dapcal.integrations.mlflow as flavor
from dapcal.models import load
from table_cases import run

NETS = "from torch import nn\n\ndef make():\n    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))\n"


@pytest.fixture
def network(tmp_path, monkeypatch) -> Path:
    """net.dap, and nets.py in a folder that nothing is imported from later."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "nets.py").write_text(NETS)
    torch.manual_seed(0)
    x = torch.randn(240, 2)
    y = (x.prod(1) + 0.3 * torch.randn(240) > 0).long()
    made = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(made.parameters(), lr=0.05)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(made(x[:120]), y[:120]).backward()
        optimizer.step()
    save_file(made.state_dict(), code / "w.safetensors")
    for name, rows in (("train", slice(0, 120)), ("held-out", slice(120, 240))):
        np.savez(code / f"{name}.npz", x=x[rows], y=y[rows])
    monkeypatch.chdir(code)
    done = run(
        "calibrate", "--model", "nets:make", "--weights", "w.safetensors", "--train", "train.npz",
        "--held-out", "held-out.npz", "-o", tmp_path / "net.dap",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_tables_model(houses, tmp_path):
    flavor.save_model(houses / "house.dap", tmp_path / "folder")
    frame = pd.read_csv(houses / "new.csv")
    predicted = mlflow.pyfunc.load_model(str(tmp_path / "folder")).predict(frame)
    done = run("predict", houses / "house.dap", houses / "new.csv", "-o", tmp_path / "out.csv")
    assert done.exit_code == 0, done.output
    expected = pd.read_csv(tmp_path / "out.csv", keep_default_na=False)
    pd.testing.assert_frame_equal(predicted, expected, rtol=1e-5, check_dtype=False)
    assert (tmp_path / "folder" / "data" / "house.dap").read_bytes() == (houses / "house.dap").read_bytes()
    assert not [path for path in (tmp_path / "folder").rglob("*") if path.suffix in (".pkl", ".pickle", ".pth")]
    assert "python_model" not in (tmp_path / "folder" / "MLmodel").read_text()
    assert flavor.load_model(tmp_path / "folder").fields() == load(houses / "house.dap").fields()


def test_a_network_in_a_new_process(network):
    flavor.save_model("net.dap", "folder", factory="nets:make", code_paths=["code/nets.py"], alpha=0.1)
    for name in ("nets.py", "w.safetensors"):
        (network / "code" / name).unlink()  # the folder's copy serves
    probe = """
import sys, mlflow, numpy
model = mlflow.pyfunc.load_model("folder")
x = numpy.array([[0.5, 0.5], [40.0, -40.0]], "float32")
frame = model.predict(x)
assert frame.equals(model.predict({"x": x}))
assert list(frame["ood"]) == [False, True], frame
"""
    done = subprocess.run([sys.executable, "-c", probe], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_options_of_a_call(houses, tmp_path):
    flavor.save_model(houses / "house.dap", tmp_path / "folder")
    predictor = flavor.Predictor(flavor.load_model(tmp_path / "folder"))
    frame = pd.read_csv(houses / "new.csv")
    assert predictor.predict(frame, {"alpha": 1.0})["ood"].all()
    wide, narrow = (predictor.predict(frame, {"level": level}) for level in (0.9, 0.5))
    assert ((wide["upper"] - wide["lower"]) > (narrow["upper"] - narrow["lower"])).all()
    with pytest.raises(ValueError, match="named alpha or level, got beta"):
        predictor.predict(frame, {"beta": 1})
    with pytest.raises(TypeError, match="a data frame with the columns of the table, got ndarray"):
        predictor.predict(np.zeros((2, 3)))


def test_into_a_run(houses, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the small MLflow has no database
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    mlflow.set_experiment("houses")
    with mlflow.start_run():
        logged = flavor.log_model(houses / "house.dap", "house")
    assert len(mlflow.pyfunc.load_model(logged.model_uri).predict(pd.read_csv(houses / "new.csv"))) == 30


def test_what_is_refused(houses, network, tmp_path):
    with pytest.raises(ValueError, match="needs no `factory`"):
        flavor.save_model(houses / "house.dap", tmp_path / "folder", factory="nets:make")
    with pytest.raises(ValueError, match="holds no code: name what makes its network"):
        flavor.save_model("net.dap", tmp_path / "folder")
    load("net.dap", nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))).calibrated.save("plain.dap")
    with pytest.raises(ValueError, match="does not say what its inputs are"):
        flavor.save_model("plain.dap", tmp_path / "folder", factory="nets:make")
    assert not (tmp_path / "folder").exists()
