"""MNIST and Fashion-MNIST: the paper's image experiments, as data (sections 5.3, appendix)."""

from __future__ import annotations

from functools import partial

from torch import nn

from dapcal.experiments.images.bench import ImageTask
from dapcal.experiments.images.run import run_task, settings
from dapcal.experiments.records import Experiment


def mlp(rate: float) -> nn.Sequential:
    """784-30-30-10, tanh."""
    return nn.Sequential(
        nn.Flatten(), *_hidden(784, 30, nn.Tanh, rate), *_hidden(30, 30, nn.Tanh, rate), nn.Linear(30, 10)
    )


def lenet(rate: float) -> nn.Sequential:
    """LeNet-5 with ReLU and max pooling."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), *_hidden(400, 120, nn.ReLU, rate), *_hidden(120, 84, nn.ReLU, rate), nn.Linear(84, 10),
    )  # fmt: skip


def _hidden(inputs: int, width: int, activation: type[nn.Module], rate: float) -> list[nn.Module]:
    return [nn.Linear(inputs, width), activation(), *([nn.Dropout(rate)] if rate else [])]


MNIST = ImageTask(
    inside="MNIST", outside=("Fashion-MNIST", "SVHN", "Omniglot"), network=mlp, epochs=50, batch_size=128,
    learning_rate=1e-3, variational_rate=3e-3,
)  # fmt: skip
FASHION_MNIST = ImageTask(
    inside="Fashion-MNIST", outside=("MNIST", "SVHN", "Omniglot"), network=lenet, epochs=80, batch_size=512,
    learning_rate=1e-3, variational_rate=3e-3,
)  # fmt: skip


def _experiment(name: str, title: str, task: ImageTask, text: str) -> Experiment:
    options = ("seeds", "device", "parts", "jobs", "full")
    return Experiment(title, text, partial(run_task, name, task), options, settings(task))


EXPERIMENTS = {
    "mnist": _experiment(
        "mnist", "MNIST", MNIST, "An MLP learns digits; clothes, house numbers and letters should make it unsure."
    ),
    "fashion-mnist": _experiment(
        "fashion-mnist", "Fashion-MNIST", FASHION_MNIST, "LeNet-5 learns clothes; digits and letters should make it "
        "unsure."
    ),
}  # fmt: skip
