"""Made-up pictures, and a small task on them; importable in processes that a run starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from dapcal.experiments.datasets import Images
from dapcal.experiments.images import bench as image_bench
from dapcal.experiments.images.bench import ImageTask


def pictures(part: str) -> Images:
    """Ten kinds of bright blobs on noise."""
    generator = torch.Generator().manual_seed(int(part == "train"))
    n = 260 if part == "train" else 100
    y = torch.arange(n) % 10
    x = (60 * torch.rand(n, 1, 28, 28, generator=generator)).to(torch.uint8)
    for row, label in zip(x, y.tolist(), strict=True):
        row[0, 4 + 10 * (label // 5) :, :][:9, 2 + 5 * (label % 5) :][:, :6] += 150
    flips = torch.rand(n, generator=generator) < 0.15  # some labels are wrong, so that some are misclassified
    return Images(x, torch.where(flips, (y + 1) % 10, y))


def noise() -> Tensor:
    return torch.rand(40, 1, 28, 28, generator=torch.Generator().manual_seed(5))


def flat() -> Tensor:
    grey = torch.rand(30, 1, 1, 1, generator=torch.Generator().manual_seed(6))
    return grey.expand(-1, 1, 28, 28).contiguous()


OUTSIDE: dict[str, Callable[[], Tensor]] = {"noise": noise, "flat": flat}
image_bench.INSIDE["blobs"] = pictures  # whoever unpickles a task imports this module for its network, and has the data
image_bench.OUTSIDE.update(OUTSIDE)


def small(rate: float) -> nn.Sequential:
    """784-12-10, tanh."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 12), nn.Tanh(), nn.Dropout(rate), nn.Linear(12, 10))


def convolutions(rate: float) -> nn.Sequential:
    """LeNet's layers, but fewer channels."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 6, stride=4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 12, 2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(12, 12), nn.ReLU(), nn.Dropout(rate), nn.Linear(12, 10),
    )  # fmt: skip


TASK = ImageTask(
    inside="blobs", outside=("noise", "flat"), network=small, epochs=3, batch_size=80, learning_rate=1e-3,
    variational_rate=3e-3, swag_epochs=4, draws=25, members=2, held_out=100,
)  # fmt: skip


def doze(place: Path) -> None:
    """Work that says that it has begun and does not end."""
    place.touch()
    time.sleep(1000)
