"""A network trained by SGD so that a GPU waits for the host once an epoch; it goes on where it was stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR

from dapcal.files import complete_or_absent


class OutOfTime(Exception):
    """The minutes of this run are over; the same command goes on."""


@dataclass(frozen=True)
class Clock:
    """When a run is to stop.

    Attributes:
        end: by `time.monotonic`; infinite without a limit.
    """

    end: float = math.inf

    @classmethod
    def of(cls, minutes: float | None) -> Clock:
        """So many minutes from now on; None: without end."""
        return cls() if minutes is None else cls(time.monotonic() + 60 * minutes)

    def check(self, needed: float = 0.0) -> None:
        """Refuse what takes longer (in seconds) than what is left."""
        if time.monotonic() + needed > self.end:
            raise OutOfTime


def train(
    network: nn.Module,
    data: tuple[Tensor, Tensor],
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    weight_decay: float,
    seed: int,
    checkpoint: Path,
    compiled: bool = False,
    checkpoint_seconds: float = 60.0,
    clock: Clock | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,  # noqa: ARG005
) -> None:
    """Minimise the cross-entropy in place, by SGD with Nesterov momentum 0.9 along a cosine.

    An epoch's order, augmentation and dropout come from the seed and its number alone, so that a run that was stopped
    needs no state of generators to go on.

    Args:
        network: on the device of the data.
        data: images and labels; all of them fit there.
        epochs: passes over the data.
        batch_size: images a step.
        learning_rate: at the start; it falls to zero.
        weight_decay: for all parameters.
        seed: of the epochs' orders and of what the network draws.
        checkpoint: file that the run goes on from; the caller removes it when the weights are safe.
        compiled: by `torch.compile`, which takes a minute and is faster afterwards; full batches alone.
        checkpoint_seconds: between two of them, at the ends of epochs.
        clock: asked after every epoch; when time is over a checkpoint is written first.
        progress: told of epochs done.
    """
    x, y = data
    optimizer = SGD(
        network.parameters(), learning_rate, momentum=0.9, nesterov=True, weight_decay=weight_decay,
        fused=x.device.type == "cuda" or None,  # a tenth of the time of a wide ResNet's step
    )  # fmt: skip
    schedule = CosineAnnealingLR(optimizer, max(1, epochs * math.ceil(len(x) / batch_size)))
    parts: dict[str, Any] = {"network": network, "optimizer": optimizer, "schedule": schedule}
    done = _resumed(checkpoint, parts, x.device)
    network.train()
    fast = torch.compile(network, dynamic=False) if compiled else network
    written = time.monotonic()
    with _fast(x.device):
        for epoch in range(done, epochs):
            torch.manual_seed(10_000 * seed + epoch)
            total = torch.zeros((), device=x.device)
            for rows in torch.randperm(len(x), device=x.device).split(batch_size):
                forward = fast if len(rows) == batch_size else network
                loss = cross_entropy(forward(x[rows]), y[rows])
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                schedule.step()
                total += loss.detach() * len(rows)
            if not math.isfinite(float(total)):
                raise ValueError(f"The loss is no longer finite in epoch {epoch + 1}; lower the learning rate")
            progress(epoch + 1, epochs)
            is_over = clock is not None and time.monotonic() > clock.end
            if epoch + 1 < epochs and (is_over or time.monotonic() - written >= checkpoint_seconds):
                _write(checkpoint, parts, epoch + 1)
                written = time.monotonic()
            if epoch + 1 < epochs and is_over:
                raise OutOfTime
    network.eval()


def _resumed(checkpoint: Path, parts: dict[str, Any], device: torch.device) -> int:
    """Epochs that are done."""
    if not checkpoint.exists():
        return 0
    saved = torch.load(checkpoint, map_location=device, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return saved["epoch"]


def _write(checkpoint: Path, parts: dict[str, Any], epoch: int) -> None:
    with complete_or_absent(checkpoint) as path:
        torch.save({"epoch": epoch, **{name: part.state_dict() for name, part in parts.items()}}, path)


@contextmanager
def _fast(device: torch.device) -> Iterator[None]:
    """Generators given back as they were; on a GPU the fastest convolutions, whether or not they repeat bit by bit."""
    before = torch.backends.cudnn.benchmark
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            torch.backends.cudnn.benchmark = device.type == "cuda"
            yield
        finally:
            torch.backends.cudnn.benchmark = before
