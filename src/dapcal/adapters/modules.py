"""Modules that predict with several draws at once, or with a new draw on every call; Lightning modules as plain ones.

In use:

    wrapped = torch_uncertainty.methods.mc_dropout(model, num_estimators=30)
    posterior = dapcal.adapters.modules.from_module(wrapped, Categorical())
    network = dapcal.adapters.modules.from_lightning(lightning_module)  # for dapcal.posteriors.map.point and the like
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dapcal.likelihoods import Likelihood
from dapcal.networks import as_tensor, frozen_copy
from dapcal.posteriors.predictions import StackedPredictions


def from_module(
    module: nn.Module,
    likelihood: Likelihood,
    *,
    draws: int | None = None,
    axis: int = 0,
    seed: int | None = 0,
    batch_size: int = 512,
) -> StackedPredictions:
    """The predictions of any module, as draws.

    In evaluation mode the module may return, for N inputs,

    - (S, N, C), or (N, S, C) with `axis=1`;
    - (S·N, C), draw after draw, as torch-uncertainty's ensembles and MC dropout do;
    - (N, C), of one new draw on every call: it is called `draws` times.

    A module that draws from torch's global generator is given the same state of it on every call, so its predictions
    reproduce, and the generator is left as it was. If its draws differ between the inputs of a batch (dropout's do), a
    prediction still depends on the batch that an input comes in, as it does in the library; with `batch_size=1` it does
    not: every input meets the same draws, and a draw is one function of the input.

    Distances are measured between inputs, as there is no network to take features from; give a projector for others.
    An artefact is read back with `dapcal.load(path, from_module(module, likelihood).function)`.

    Args:
        module: copied in evaluation mode.
        likelihood: p(y | outputs).
        draws: S, for (S·N, C) by default the module's `num_estimators`.
        axis: of the draws in predictions with three dimensions.
        seed: of torch's global generator in every call; None leaves it alone, for modules that draw nothing.
        batch_size: inputs a call.
    """
    if draws is None and getattr(module, "num_estimators", None) is not None:
        draws = int(module.num_estimators)  # type: ignore[arg-type]
    if draws is not None and draws < 1:
        raise ValueError(f"Expected `draws` >= 1, got {draws}")
    if axis not in (0, 1):
        raise ValueError(f"Expected `axis` 0 for (S, N, C) or 1 for (N, S, C), got {axis}")
    if batch_size < 1:
        raise ValueError(f"Expected `batch_size` >= 1, got {batch_size}")
    return StackedPredictions(_Stacked(frozen_copy(module), draws, axis, seed, batch_size), likelihood)


@dataclass(frozen=True, eq=False)
class _Stacked:
    """Inputs (N, ...) to outputs (S, N, C), the same on every call."""

    module: nn.Module
    draws: int | None
    axis: int
    seed: int | None
    batch_size: int

    def __call__(self, x: Tensor) -> Tensor:
        device = next((t.device for t in [*self.module.parameters(), *self.module.buffers()]), x.device)
        x = x.to(device)
        outputs = torch.cat([self._predict(batch) for batch in x.split(self.batch_size)], 1)
        self._check_repeats(x[:1])
        return outputs

    def _check_repeats(self, x: Tensor) -> None:
        if torch.equal(self._predict(x), self._predict(x)):
            return
        remedy = "give a `seed`" if self.seed is None else "it has a generator of its own: seed that in its forward"
        raise ValueError(f"Expected the same predictions on every call, but the module draws anew each time; {remedy}")

    def _predict(self, x: Tensor) -> Tensor:
        with torch.no_grad(), _global_generator(self.seed, x.device):
            outputs = self._stack(x, self._call(x))
        return outputs[..., None] if outputs.ndim == 2 else outputs  # (S, N): one output

    def _call(self, x: Tensor) -> Tensor:
        return as_tensor(self.module(x))

    def _stack(self, x: Tensor, first: Tensor) -> Tensor:
        n, draws = len(x), self.draws
        if first.ndim == 3:
            outputs = first if self.axis == 0 else first.transpose(0, 1)
            if outputs.shape[1] != n or draws not in (None, len(outputs)):
                wanted = ("S" if draws is None else str(draws), str(n))
                shape = ", ".join((*(wanted if self.axis == 0 else wanted[::-1]), "C"))
                raise ValueError(
                    f"Expected predictions ({shape}) for {n} inputs, got {tuple(first.shape)}; `axis` is the draws'"
                )
            return outputs
        if draws is None:
            raise ValueError(
                f"Expected predictions (S, {n}, C), got {tuple(first.shape)}; for (S * {n}, C), draw after draw, or "
                "for a module that draws anew on every call, give `draws`"
            )
        if first.ndim not in (1, 2) or len(first) not in (n, draws * n):
            raise ValueError(
                f"Expected predictions ({draws} * {n}, C) or ({n}, C) for {draws} draws and {n} inputs, got "
                f"{tuple(first.shape)}; set `draws` to the number that the module returns"
            )
        if len(first) == draws * n and draws > 1:
            return first.reshape(draws, n, *first.shape[1:])
        outputs = torch.stack([first, *(self._call(x) for _ in range(draws - 1))])
        if draws > 1 and (outputs == outputs[:1]).all():
            raise ValueError(
                f"Expected a new draw on every call, but {draws} calls gave the same predictions; dropout is off in "
                "evaluation mode unless a wrapper keeps it on, and a single network has no spread"
            )
        return outputs


@contextmanager
def _global_generator(seed: int | None, device: torch.device) -> Iterator[None]:
    """Torch's global generators seeded, and put back afterwards; None leaves them alone."""
    if seed is None:
        yield
        return
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed)
        for one in cuda:
            with torch.cuda.device(one):
                torch.cuda.manual_seed(seed)
        yield


def from_lightning(module: nn.Module) -> nn.Module:
    """A copy of a LightningModule that is a plain network: no trainer, and nothing logged from its forward.

    Lightning modules are modules, so all of dapcal takes them; what fails outside a trainer is a forward that logs
    (`self.log` warns or raises there), and copying in releases that copy the trainer too. Names stay as they are.

    Args:
        module: a LightningModule whose forward maps inputs to outputs (N, C).
    """
    missing = [name for name in ("log", "log_dict", "training_step") if not callable(getattr(module, name, None))]
    if missing:
        raise TypeError(
            f"Expected a LightningModule, got {type(module).__name__} without {missing}; a plain module needs no "
            "adapter"
        )
    forward = type(module).forward
    if getattr(forward, "__module__", "").split(".")[0] in ("lightning", "pytorch_lightning", "torch"):
        raise TypeError(
            f"Expected {type(module).__name__} to define `forward`, it has only steps; define it, or pass the network "
            f"inside, one of {[name for name, _ in module.named_children()]}"
        )
    parts = [m for m in module.modules() if getattr(m, "_trainer", None) is not None]
    network = copy.deepcopy(module, {id(m._trainer): None for m in parts})
    for part in network.modules():
        if callable(getattr(part, "log_dict", None)) and callable(getattr(part, "training_step", None)):
            part.log = part.log_dict = _nothing  # type: ignore[assignment]
    return network


def _nothing(*_values: Any, **_options: Any) -> None:
    """In place of logging."""
