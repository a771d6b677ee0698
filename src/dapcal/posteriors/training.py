"""The loop that MAP and variational inference share: Adam along a cosine, one loss per minibatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dapcal.data import Labelled, minibatches, size

Progress = Callable[[int, float], None]
"""Called after every epoch with its number (from 1) and the mean loss per training input."""


def minimise(
    loss: Callable[[Tensor, Tensor], Tensor],
    parameters: Iterable[Tensor],
    data: Labelled | DataLoader,
    *,
    epochs: int,
    learning_rate: float,
    batch_size: int,
    generator: torch.Generator,
    progress: Progress | None,
) -> None:
    """Minimise the mean over the training data of `loss(x, y)`, a minibatch's mean, in place.

    Args:
        loss: mean loss of a minibatch of inputs and targets.
        parameters: leaf tensors to learn.
        data: tensors in memory, or a DataLoader with batches and order of its own.
        epochs: passes over the data.
        learning_rate: Adam's at the start; it falls to zero along a cosine.
        batch_size: where `data` is no DataLoader.
        generator: of the order of the batches.
        progress: called after every epoch.
    """
    optimiser = torch.optim.Adam(list(parameters), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(epochs, 1))
    count = size(data)
    for epoch in range(1, epochs + 1):
        total = 0.0
        for x, y in minibatches(data, batch_size, generator):
            value = loss(x, y)
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
            total += value.item() * len(x)
        if not math.isfinite(total):
            raise ValueError(
                f"The loss became {total} in epoch {epoch}; lower `learning_rate` or scale the inputs and targets"
            )
        schedule.step()
        if progress is not None:
            progress(epoch, total / count)
