"""The image experiments on made-up pictures: every row, resuming, and what is remembered."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dapcal.experiments import image_bench
from dapcal.experiments.datasets import Images
from dapcal.experiments.image_bench import ImageTask
from dapcal.experiments.image_methods import methods
from dapcal.experiments.image_run import run_task
from dapcal.experiments.images import MNIST, lenet, mlp
from dapcal.experiments.records import Run

pytestmark = pytest.mark.filterwarnings("ignore::dapcal.types.DapcalWarning")


def pictures(part: str, seed: int = 0) -> Images:
    """Ten kinds of bright blobs on noise."""
    generator = torch.Generator().manual_seed(seed + (part == "train"))
    n = 700 if part == "train" else 200
    y = torch.arange(n) % 10
    x = (60 * torch.rand(n, 1, 28, 28, generator=generator)).to(torch.uint8)
    for row, label in zip(x, y.tolist(), strict=True):
        row[0, 4 + 10 * (label // 5) :, :][:9, 2 + 5 * (label % 5) :][:, :6] += 150
    flips = torch.rand(n, generator=generator) < 0.15  # some labels are wrong, so that some are misclassified
    return Images(x, torch.where(flips, (y + 1) % 10, y))


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> ImageTask:
    monkeypatch.setattr(image_bench, "INSIDE", {"blobs": pictures})
    generator = torch.Generator().manual_seed(5)
    noise, flat = torch.rand(60, 1, 28, 28, generator=generator), torch.rand(50, 1, 1, 1, generator=generator)
    outside = {"noise": lambda: noise, "flat": lambda: flat.expand(-1, 1, 28, 28).contiguous()}
    monkeypatch.setattr(image_bench, "OUTSIDE", outside)
    return replace(
        MNIST, inside="blobs", outside=("noise", "flat"), epochs=3, swag_epochs=4, draws=26, members=2, held_out=200
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("network", [mlp, lenet])
def test_every_row_is_made_and_measured(task: ImageTask, network, tmp_path: Path):
    task = replace(task, network=network)
    said: list[str] = []
    outcome = run_task("blobs", task, Run(tmp_path, seeds=1, say=said.append))
    rows = outcome.numbers["runs"][0]["rows"]
    assert list(rows) == list(methods(task.outside))
    assert len(said) == len(rows)
    for name, row in rows.items():
        main = outcome.numbers["main_scores"][name]
        assert set(row["ood"][main]) == {"noise", "flat"}, name
        for found in row["ood"].values():
            for detection in found.values():
                assert all(0 <= value <= 1 for value in detection.values())
        if name.startswith(("DAP", "DE +")):
            assert torch.isfinite(torch.tensor(row["facts"]["phi"]))
    json.dumps(outcome.numbers, allow_nan=False)
    assert rows["VI"]["test"]["accuracy"] == rows["DAP, ours"]["test"]["accuracy"]
    assert set(rows["DAP, paper's"]["weights"]) == {"test", "noise", "flat"}
    assert "curves" in rows["DAP, ours"]
    assert "curves" not in rows["energy"]
