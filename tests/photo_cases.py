"""Made-up photographs in the files of CIFAR-10, CIFAR-100 and SVHN, and a task of a miniature network on them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from dapcal.experiments.cifar.networks import WideResNet
from dapcal.experiments.cifar.task import PhotoTask, task_for
from data_cases import Places, parquet_file


def miniature(rate: float) -> nn.Module:
    """A miniature, not the paper's."""
    return WideResNet(10, 1, stride=4, rate=rate)


TASK: PhotoTask = replace(
    task_for("cpu"), network=miniature, train=160, test=30, held_out=80, epochs=3, batch_size=40, members=2, draws=3,
    variational_epochs=1, swag_epochs=2, swag_per_epoch=2, tuning=10, made=20, learnt_kept=20,
)  # fmt: skip


def photographs(number: int, seed: int) -> tuple[np.ndarray, list[int]]:
    """Squares of ten colours and places on noise, (N, 32, 32, 3); some labels are wrong."""
    draw = np.random.default_rng(seed)
    x = draw.integers(0, 90, (number, 32, 32, 3)).astype(np.uint8)
    labels = np.arange(number) % 10
    for image, label in zip(x, labels, strict=True):
        image[4 + 12 * (label // 5) :, 2 + 5 * (label % 5) :][:9, :8, label % 3] += 150
    wrong = draw.random(number) < 0.15
    return x, np.where(wrong, (labels + 1) % 10, labels).tolist()


def put_photographs(places: Places) -> None:
    """All files that the experiment reads."""
    for file, number, label in (
        ("cifar10/train", 260, "label"), ("cifar10/test", 40, "label"), ("cifar100/test", 40, "fine_label"),
        ("svhn/test", 40, "label"),
    ):  # fmt: skip
        x, y = photographs(number, len(file))
        if "cifar10/" not in file:
            x = np.ascontiguousarray(x[:, ::-1, :, ::-1])  # upside down, colours exchanged
        places.put(f"{file}.parquet", parquet_file(x, y, label, kind="png"))


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    """Bit for bit, buffers too."""
    states = one.state_dict(), other.state_dict()
    return all(torch.equal(states[0][name], states[1][name]) for name in states[0])
