"""A module evaluated with parameters from outside: one vector per draw, many draws at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

MEMORY = 2**28  # bytes of activations that one step may take, about


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the parameters in a flat vector, in order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Number of entries of each parameter."""
        return {n: torch.Size(s).numel() for n, s in zip(self.names, self.shapes, strict=True)}

    def flatten(self, parameters: Mapping[str, Tensor], batch: int = 0) -> Tensor:
        """One vector (P,), or (S, P) where the parameters have `batch` = 1 leading dimension."""
        return torch.cat([p.reshape((*p.shape[:batch], -1)) for p in (parameters[name] for name in self.names)], -1)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Views into a vector (P,) or stack of vectors (S, P), by name."""
        parts = vector.split(list(self.sizes.values()), -1)
        return {
            name: part.reshape((*vector.shape[:-1], *shape))
            for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }


def layout_of(parameters: Mapping[str, Tensor]) -> Layout:
    """The layout of named tensors."""
    return Layout(tuple(parameters), tuple(tuple(p.shape) for p in parameters.values()))


def frozen_copy(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode that no later training of `model` touches."""
    return copy.deepcopy(model).eval().requires_grad_(False)


def split_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Copies of the parameters that are learnt, and of all else (frozen parameters, buffers), by name."""
    learnt = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    if not learnt:
        raise ValueError("Expected a model with parameters that require a gradient, got none; unfreeze some")
    rest = [*model.named_parameters(), *model.named_buffers()]
    return learnt, {n: t.detach().clone() for n, t in rest if n not in learnt}


def evaluate(
    model: nn.Module,
    draws: Mapping[str, Tensor],
    shared: Mapping[str, Tensor],
    x: Tensor,
    batch_size: int = 512,
) -> Tensor:
    """Outputs (S, N, C) of S draws at N inputs.

    Networks of matrix products run all draws of a batch at once (`vmap`); others (convolutions, recurrences) run
    draw by draw, which is faster for them: grouped convolutions cost two to three times a plain loop on a CPU.

    Args:
        model: a module in evaluation mode.
        draws: parameters and buffers that differ between draws, each (S, ...).
        shared: those that do not.
        x: inputs (N, ...).
        batch_size: inputs per step; bounds the memory of activations together with `MEMORY`.
    """
    count = len(next(iter(draws.values())))

    def forward(own: dict[str, Tensor], batch: Tensor) -> Tensor:
        return as_tensor(functional_call(model, {**shared, **own}, (batch,)))

    device = next(iter(draws.values())).device
    pieces = []
    with torch.no_grad():
        vectorised = _is_matrix_network(model) and _vectorises(forward, draws, x[:1].to(device))
        for batch in x.split(batch_size):
            moved = batch.to(device)
            if vectorised:
                widest = max((p.shape[-2] for p in draws.values() if p.ndim == 3), default=1)
                chunk = max(1, MEMORY // (max(1, len(batch) * widest) * 4 * 4))
                piece = vmap(forward, in_dims=(0, None), chunk_size=min(chunk, count))(dict(draws), moved)
            else:
                piece = torch.stack([forward({n: d[s] for n, d in draws.items()}, moved) for s in range(count)])
            pieces.append(_check_outputs(piece, len(batch)))
    return torch.cat(pieces, 1)


def execution_order(network: nn.Module, modules: Mapping[str, nn.Module], x: Tensor) -> list[str]:
    """Names of some of a network's modules in the order in which they run on x."""
    order: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda _module, _inputs, name=name: order.append(name))
        for name, module in modules.items()
    ]
    try:
        with torch.no_grad():
            network(x.to(next(network.parameters()).device))
    finally:
        for handle in handles:
            handle.remove()
    return order


def as_tensor(output: object) -> Tensor:
    """The output of a model, if it is a tensor."""
    if not isinstance(output, Tensor):
        raise TypeError(f"Expected the model to return a tensor (N, C), got {type(output).__name__}")
    return output


def _check_outputs(outputs: Tensor, n: int) -> Tensor:
    if outputs.ndim == 2:  # a model that returns (N,) has one output
        outputs = outputs[..., None]
    if outputs.ndim != 3 or outputs.shape[1] != n:
        raise ValueError(
            f"Expected the model to return ({n}, C) for {n} inputs, got {tuple(outputs.shape[1:])}; add a final layer "
            "that flattens"
        )
    if not outputs.isfinite().all():
        raise ValueError("The model returned NaN or inf; check its weights and the scale of the inputs")
    return outputs


def one_column(outputs: Tensor) -> Tensor:
    """A model that returns (N,) has one output, (N, 1)."""
    return outputs[:, None] if outputs.ndim == 1 else outputs


def _vectorises(forward: Callable[[dict[str, Tensor], Tensor], Tensor], draws: Mapping[str, Tensor], x: Tensor) -> bool:
    """Whether `vmap` can run the model: control flow that looks at activations stops it."""
    try:
        vmap(forward, in_dims=(0, None))({n: d[:1] for n, d in draws.items()}, x)
    except RuntimeError:
        return False
    return True


_MATRIX_LAYERS = (nn.Linear, nn.LayerNorm, nn.BatchNorm1d)


def _is_matrix_network(model: nn.Module) -> bool:
    return all(isinstance(m, _MATRIX_LAYERS) for m in model.modules() if any(True for _ in m.parameters(False)))
