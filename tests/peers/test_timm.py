"""A model of timm's by name and weights file; skipped where torchvision, which timm needs, does not import."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from table_cases import run

timm = pytest.importorskip("timm", exc_type=ImportError, reason="timm needs torchvision")
NAME = "timm:resnet18,num_classes=3,in_chans=1"


def test_a_model_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    save_file(timm.create_model("resnet18", num_classes=3, in_chans=1).state_dict(), "w.safetensors")
    for name in ("train", "held-out"):
        np.savez(f"{name}.npz", x=torch.rand(60, 1, 32, 32), y=np.arange(60) % 3)
    options = ("--weights", "w.safetensors", "--train", "train.npz", "--held-out", "held-out.npz", "-o", "net.dap")
    done = run("calibrate", "--model", NAME, *options)
    assert done.exit_code == 0, done.output
    done = run("predict", "net.dap", "held-out.npz", "--model", NAME, "-o", "out.csv")
    assert done.exit_code == 0, done.output
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 61
