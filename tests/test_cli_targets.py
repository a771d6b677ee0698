"""Commands with several labels or several numbers an input: calibrate, predict, explain and report."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from dapcal.cli import app

pytestmark = pytest.mark.filterwarnings("ignore::dapcal.types.DapcalWarning")  # few held-out inputs are wrong

NETS = "from torch import nn\n\n\ndef two():\n    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))\n"


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert "Traceback" not in result.output
    assert result.exit_code == code, result.output
    return result.output


def data(kind: str, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((n, 2)).astype(np.float32)
    signal = np.stack([x.sum(1), x[:, 0] - x[:, 1] ** 2 + 0.5], 1) + 0.5 * generator.standard_normal((n, 2))
    return x, (signal > 0).astype(np.int64) if kind == "multi-label" else signal.astype(np.float32)


@pytest.fixture(scope="module", params=["multi-label", "regression"])
def kind(request, tmp_path_factory) -> tuple[str, Path]:
    """A folder with a trained network's weights and data."""
    folder, name = tmp_path_factory.mktemp("targets"), request.param
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
        x, y = map(torch.from_numpy, data(name, 200, 0))
        optimizer = torch.optim.Adam(network.parameters(), 0.03)
        loss_of = nn.functional.mse_loss if name == "regression" else nn.functional.binary_cross_entropy_with_logits
        for _ in range(60):
            loss = loss_of(network(x), y.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    save_file(network.state_dict(), folder / "w.safetensors")
    (folder / "nets_of_targets.py").write_text(NETS)
    for part, (n, seed) in {"train": (200, 0), "held": (120, 1), "new": (30, 2)}.items():
        x, y = data(name, n, seed)
        np.savez(folder / f"{part}.npz", x=x + 6 * (part == "new"), y=y)
    return name, folder


def test_from_weights_to_a_report(kind, monkeypatch):
    name, folder = kind
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    given = ["--classes", "sunny,windy"] if name == "multi-label" else []
    told = run(
        "calibrate", "--model", "nets_of_targets:two", "--weights", "w.safetensors", "--train", "train.npz",
        "--held-out", "held.npz", "-o", "m.dap", "--json", *given,
    )  # fmt: skip
    found = json.loads(told[told.index("{") :])
    assert found["task"] == name
    assert found["nll_after"] <= found["nll_before"] + 0.1
    run("predict", "m.dap", "new.npz", "--model", "nets_of_targets:two", "-o", "out.csv")
    with Path("out.csv").open() as text:
        rows = list(csv.DictReader(text))
    assert len(rows) == 30
    if name == "multi-label":
        for row in rows:
            assert row["prediction_sunny"] == str(int(float(row["probability_sunny"]) > 0.5))
            assert 0 <= float(row["epistemic_windy"]) <= 0.25
    else:
        assert all(float(row["lower_1"]) < float(row["prediction_1"]) < float(row["upper_1"]) for row in rows)
    assert np.mean([row["ood"] == "true" for row in rows]) > 0.5
    run("predict", "m.dap", "new.npz", "--model", "nets_of_targets:two", "-o", "out.npz")
    with np.load("out.npz") as file:
        arrays = dict(file)
    assert arrays["prediction"].shape == (30, 2)
    explained = run("explain", "m.dap", "new.npz", "--row", "1", "--model", "nets_of_targets:two")
    assert ("sunny" if name == "multi-label" else "95 % interval") in explained
    run("report", "m.dap", "--model", "nets_of_targets:two", "--data", "new.npz", "-o", "r.html")
    page = Path("r.html").read_text()
    if name == "multi-label":
        assert "2 labels: sunny, windy" in page
        assert "examples with all labels right" in page
        assert "Label by label, after" in page
    else:
        assert "targets inside" in page
    assert "nan" not in page.lower().replace("nano", "").split("<svg")[0]
    refused = run("serve", "m.dap", "--model", "nets_of_targets:two", code=2)
    assert "use `dapcal predict` for several" in " ".join(refused.split())
