"""The trainer that all fitted posteriors share: seeded, resumable, with early stopping and a progress bar.

A method brings a step (what happens on a minibatch) and the tensors that it changes; the trainer brings the rest. A
checkpoint holds everything a run depends on, so that a run that was killed goes on to the same result, bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dapcal.data import Labelled, batch_count, in_memory, order_of, pairs_of, shuffled, size
from dapcal.posteriors._training import checkpoints
from dapcal.posteriors.training import Training, schedule_of
from dapcal.progress import Epoch, told

Step = Callable[[Tensor, Tensor], Tensor]
"""Learns from a minibatch, in place, and returns its mean loss."""


class Stateful(Protocol):
    """Anything a run depends on beside its tensors (optimiser, schedule, moments collected on the way)."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint stores: tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Back to what was stored."""
        ...


def minimise(
    loss: Step,
    parameters: list[Tensor],
    tensors: Mapping[str, Tensor],
    train: Labelled | DataLoader,
    *,
    training: Training,
    generator: torch.Generator,
    method: str,
    settings: Mapping[str, Any],
    held_out_nll: Step,
) -> None:
    """Minimise the mean over the training data of `loss(x, y)`, a minibatch's mean, by gradient steps.

    Args:
        loss: mean loss of a minibatch, differentiable.
        parameters: leaf tensors to learn.
        tensors: all tensors that training changes, by name (parameters, and buffers of batch norm).
        train: checked training data.
        training: how.
        generator: of batches and of whatever the loss draws.
        method: name in the checkpoint.
        settings: of the method; a checkpoint of other settings is refused.
        held_out_nll: mean negative log-likelihood of a minibatch.
    """
    optimizer = training.optimizer(parameters, float(training.learning_rate))
    schedule = schedule_of(training, optimizer, train)

    def step(x: Tensor, y: Tensor) -> Tensor:
        value = loss(x, y)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        schedule.step()
        return value.detach()

    state: dict[str, Stateful] = {"optimizer": optimizer, "schedule": schedule}
    run(
        step,
        tensors,
        state,
        train,
        training=training,
        generator=generator,
        method=method,
        settings=settings,
        held_out_nll=held_out_nll,
    )


def run(
    step: Step,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Stateful],
    train: Labelled | DataLoader,
    *,
    training: Training,
    generator: torch.Generator,
    method: str,
    settings: Mapping[str, Any],
    held_out_nll: Step,
) -> None:
    """Take steps for `training.epochs` epochs, or until the held-out NLL no longer falls.

    Args:
        step: learns from a minibatch, in place.
        tensors: all tensors that steps change, by name.
        state: everything else that they depend on.
        train: checked training data.
        training: how.
        generator: of batches and of whatever the step draws.
        method: name in the checkpoint.
        settings: of the method; a checkpoint of other settings is refused.
        held_out_nll: mean negative log-likelihood of a minibatch.
    """
    held_out = None if training.held_out is None else in_memory(training.held_out, "held_out")
    device = next(iter(tensors.values())).device
    with told(training.progress, method) as progress, _own_randomness(device, generator):
        if training.row_weights is not None and (
            isinstance(train, DataLoader) or len(training.row_weights) != len(train.x)
        ):
            raise ValueError(
                f"Expected `row_weights` for the {size(train)} training pairs in memory, got "
                f"{len(training.row_weights)}; a DataLoader weighs by a sampler of its own"
            )
        at = _Run(tensors, state, train, generator, training.row_weights)
        saved = None if training.checkpoint is None else Path(training.checkpoint)
        marks: dict[str, Any] = {}
        if saved is not None:
            checkpoints.check_place(saved)
            marks = _marks(method, settings, training, train, held_out, tensors, state, generator)
        guarded: Callable[[], AbstractContextManager[None]] = nullcontext
        if saved is not None and saved.exists():
            kept = checkpoints.read(saved, marks)
            guarded = partial(checkpoints.refused_if_damaged, saved)
            with guarded():
                at.load_state_dict(kept)
        written = time.monotonic()

        def save(now: bool) -> None:
            nonlocal written
            if saved is not None and (now or time.monotonic() - written >= training.checkpoint_seconds):
                checkpoints.write(saved, marks, at.state_dict())
                written = time.monotonic()

        while at.epoch < training.epochs and not at.stopped:
            for x, y in at.rest_of_epoch(training.batch_size):
                with guarded():  # an optimiser takes any state, and shows in its first step whether it can use it
                    loss = step(x, y)
                guarded = nullcontext
                at.total += loss.double() * len(x)
                at.seen += len(x)
                at.position += 1
                if not isinstance(train, DataLoader):
                    save(now=False)
            mean_loss = at.end_of_epoch()
            nll = None
            if held_out is not None:
                with torch.random.fork_rng(devices=[]):  # a loader draws a seed
                    nll = _mean(held_out_nll, held_out, training.batch_size)
                at.compare(nll, training.patience)
            save(now=False)
            if progress is not None:
                progress(Epoch(at.epoch, training.epochs, mean_loss, nll))
        if training.patience is not None:
            at.back_to_best()
        save(now=True)


@dataclass
class _Run:
    """Where a run is."""

    tensors: Mapping[str, Tensor]
    state: Mapping[str, Stateful]
    train: Labelled | DataLoader
    generator: torch.Generator
    weights: Tensor | None = None
    epoch: int = 0
    position: int = 0  # minibatches of this epoch that are done
    seen: int = 0
    stopped: bool = False
    order: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    best_nll: float = math.inf
    best_epoch: int = 0
    best: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.total = torch.zeros((), dtype=torch.float64, device=next(iter(self.tensors.values())).device)

    def rest_of_epoch(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The minibatches of this epoch that are still to come."""
        if isinstance(self.train, DataLoader):
            yield from pairs_of(self.train, "train")
            return
        if self.position == 0:
            self.order = order_of(len(self.train.x), self.generator, self.weights)
        yield from shuffled(self.train, self.order, batch_size, self.position)

    def end_of_epoch(self) -> float:
        """The mean loss; the counters start again."""
        loss = float(self.total) / max(self.seen, 1)
        self.epoch, self.position, self.seen = self.epoch + 1, 0, 0
        self.total.zero_()
        if not math.isfinite(loss):
            raise ValueError(
                f"The loss became {loss} in epoch {self.epoch}; lower `learning_rate` or scale the inputs and targets"
            )
        return loss

    def compare(self, nll: float, patience: int | None) -> None:
        """Keep the best weights; stop where patience ends."""
        if nll < self.best_nll:
            self.best_nll, self.best_epoch = nll, self.epoch
            self.best = {} if patience is None else {n: t.detach().clone() for n, t in self.tensors.items()}
        self.stopped = patience is not None and self.epoch - self.best_epoch >= patience

    def back_to_best(self) -> None:
        """The weights with the lowest held-out NLL."""
        _copy_into(self.tensors, self.best)
        self.best = {}

    def state_dict(self) -> dict[str, Any]:
        loader = self.train.generator if isinstance(self.train, DataLoader) else None
        state = {
            "tensors": {n: t.detach() for n, t in self.tensors.items()},
            "state": {n: s.state_dict() for n, s in self.state.items()},
            "epoch": self.epoch, "position": self.position, "seen": self.seen, "stopped": self.stopped,
            "order": self.order, "total": self.total, "best": self.best, "best_nll": self.best_nll,
            "best_epoch": self.best_epoch,
            "generator": self.generator.get_state(),
            "loader": None if loader is None else loader.get_state(),
            "torch": torch.random.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(self.total.device) if self.total.is_cuda else None,
        }  # fmt: skip
        return {**state, "structure": checkpoints.structure(state)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if checkpoints.structure({n: part for n, part in saved.items() if n != "structure"}) != saved["structure"]:
            raise ValueError("parts of it are missing or were exchanged")
        _copy_into(self.tensors, saved["tensors"])
        for name, part in self.state.items():
            part.load_state_dict(saved["state"][name])
        for name in ("epoch", "position", "seen", "stopped", "order", "best_nll", "best_epoch"):
            setattr(self, name, saved[name])
        self.total.copy_(saved["total"])
        self.best = {n: t.to(self.tensors[n].device) for n, t in saved["best"].items()}
        self.generator.set_state(saved["generator"])
        if isinstance(self.train, DataLoader) and self.train.generator is not None and saved["loader"] is not None:
            self.train.generator.set_state(saved["loader"])
        torch.random.set_rng_state(saved["torch"])
        if saved["cuda"] is not None and self.total.is_cuda:
            torch.cuda.set_rng_state(saved["cuda"], self.total.device)


def _mean(value: Step, data: Labelled | DataLoader, batch_size: int) -> float:
    batches: Iterable[tuple[Tensor, Tensor]]
    if isinstance(data, DataLoader):
        batches = pairs_of(data, "held_out")
    else:
        batches = zip(data.x.split(batch_size), data.y.split(batch_size), strict=True)
    with torch.no_grad():
        parts = [(value(x, y).double() * len(x), len(x)) for x, y in batches]
    return float(sum(total for total, _ in parts) / sum(n for _, n in parts))


@contextmanager
def _own_randomness(device: torch.device, generator: torch.Generator) -> Iterator[None]:
    """Dropout and loaders draw from torch's global generator: seeded here, given back as it was."""
    cuda = device.type == "cuda"
    deterministic, benchmark = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    with torch.random.fork_rng(devices=[device] if cuda else []):
        seed = int(torch.randint(2**31, (1,), generator=generator))
        torch.random.default_generator.manual_seed(seed)
        try:
            if cuda:
                torch.cuda.default_generators[device.index or 0].manual_seed(seed)
                torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
            yield
        finally:
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, benchmark


def _copy_into(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            tensors[name].copy_(value)


def _marks(
    method: str,
    settings: Mapping[str, Any],
    training: Training,
    train: Labelled | DataLoader,
    held_out: Labelled | DataLoader | None,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Stateful],
    generator: torch.Generator,
) -> dict[str, Any]:
    """What must be the same for a run to go on; taken before it starts, as text where NumPy may have made a number."""
    watched = held_out if training.patience is not None else None  # else it is only reported
    return {
        "method": method, "parameters": {n: checkpoints.structure(t) for n, t in tensors.items()},
        "seed": generator.initial_seed(), "epochs": int(training.epochs),
        "learning_rate": float(training.learning_rate), "batch_size": int(training.batch_size), "bf16": training.bf16,
        "patience": None if training.patience is None else int(training.patience),
        **{name: checkpoints.described(value) for name, value in settings.items()},
        **{name: type(part).__name__ + checkpoints.described(part.state_dict()) for name, part in state.items()},
        "number of training inputs": size(train), "number of minibatches": batch_count(train, training.batch_size),
        "training data": checkpoints.digest(train),
        "row weights": "" if training.row_weights is None else checkpoints.described(training.row_weights.tolist()),
        "held-out data": "" if watched is None else checkpoints.digest(watched),
    }  # fmt: skip
