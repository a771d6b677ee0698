"""How posteriors are trained: the options that every `fit` hands on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from dapcal.data import Data, Labelled, batch_count
from dapcal.progress import Progress


def adam(parameters: list[Tensor], learning_rate: float) -> Optimizer:
    """The default optimiser."""
    return Adam(parameters, lr=learning_rate)


def cosine(optimizer: Optimizer, steps: int) -> LRScheduler:
    """The default schedule: from the learning rate to zero along a cosine."""
    return CosineAnnealingLR(optimizer, max(steps, 1))


def constant(optimizer: Optimizer, steps: int) -> LRScheduler:  # noqa: ARG001
    """The same learning rate throughout."""
    return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)


class Options(TypedDict, total=False):
    """Keyword arguments that every `fit` hands on; `Training` says what they mean."""

    epochs: int
    learning_rate: float
    batch_size: int
    optimizer: Callable[[list[Tensor], float], Optimizer]
    schedule: Callable[[Optimizer, int], LRScheduler]
    bf16: bool
    held_out: Data | None
    patience: int | None
    checkpoint: str | Path | None
    checkpoint_seconds: float
    progress: Progress | bool
    row_weights: Tensor | None
    optimiser: Callable[[list[Tensor], float], Optimizer]


@dataclass(frozen=True, eq=False)
class Training:
    """How a posterior is trained.

    Attributes:
        epochs: passes over the training data.
        learning_rate: at the start.
        batch_size: where the training data are not a DataLoader.
        optimizer: makes one from the parameters and the learning rate.
        schedule: makes a torch scheduler from the optimiser and the number of steps; it steps after every minibatch.
        bf16: run the network in bfloat16 (autocast); weights and likelihood stay as they are.
        held_out: data whose negative log-likelihood is read after every epoch.
        patience: stop after this many epochs without a lower held-out NLL, and go back to the best; needs `held_out`.
        checkpoint: file that the run is saved to on the way, and from which it goes on if it exists.
        checkpoint_seconds: between two checkpoints; 0 writes one after every minibatch. A DataLoader's batches cannot
            be replayed, so with one checkpoints fall on the ends of epochs.
        progress: called after every epoch, or True for a bar with loss and held-out NLL (extra `progress`).
        row_weights: of the training pairs, (N,): an epoch sees a pair in proportion to it; of data in memory.
    """

    epochs: int = 100
    learning_rate: float = 1e-3
    batch_size: int = 128
    optimizer: Callable[[list[Tensor], float], Optimizer] = adam
    schedule: Callable[[Optimizer, int], LRScheduler] = cosine
    bf16: bool = False
    held_out: Data | None = None
    patience: int | None = None
    checkpoint: str | Path | None = None
    checkpoint_seconds: float = 30.0
    progress: Progress | bool = False
    row_weights: Tensor | None = None
    optimiser: InitVar[Callable[[list[Tensor], float], Optimizer] | None] = None  # the name until 0.1.0

    def __post_init__(self, optimiser: Callable[[list[Tensor], float], Optimizer] | None) -> None:
        if optimiser is not None:
            warnings.warn(
                "`optimiser` is now `optimizer`; the old name goes with the next version", DeprecationWarning, 3
            )
            object.__setattr__(self, "optimizer", optimiser)
        if self.epochs < 0 or self.batch_size < 1 or not self.learning_rate > 0:
            raise ValueError(
                "Expected `epochs` >= 0, `batch_size` >= 1 and `learning_rate` > 0, got "
                f"{self.epochs}, {self.batch_size} and {self.learning_rate}"
            )
        if self.row_weights is not None:
            check_weights(self.row_weights)
        if self.patience is not None and (self.held_out is None or self.patience < 1):
            raise ValueError(f"Expected `patience` >= 1 with `held_out` data to watch, got {self.patience}")

    def autocast(self, device: torch.device) -> torch.autocast:
        """The context that a network runs in."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.bf16)


def check_weights(weights: Tensor) -> None:
    """Refuse what rows cannot weigh."""
    if weights.ndim != 1 or not bool((weights >= 0).all()) or not 0 < float(weights.sum()) < float("inf"):
        raise ValueError(
            f"Expected `row_weights` as numbers >= 0, one a row and not all 0, got shape {tuple(weights.shape)} with a "
            f"sum of {float(weights.sum()):g}; correct those rows"
        )


def schedule_of(training: Training, optimizer: Optimizer, train: Labelled | DataLoader) -> LRScheduler:
    """The schedule of a run; it steps after every minibatch."""
    schedule = training.schedule(optimizer, int(training.epochs) * batch_count(train, training.batch_size))
    if isinstance(schedule, ReduceLROnPlateau):
        raise TypeError("ReduceLROnPlateau does not step after every minibatch; use another schedule, or `patience`")
    return schedule
