"""Flipout: every input of a minibatch sees weight noise of its own signs, for the price of two passes.

    y = x μᵀ + ((x ∘ s) Δᵀ) ∘ r,   Δ = σ ∘ ε,   s, r random signs per input.

Gradients stay unbiased and vary less than with one Δ for the whole minibatch (Wen et al. 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dapcal.networks import first_input, own_layers, parameter_name, unfused

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Flipout:
    """A network whose linear and convolutional layers add flipout noise; other parameters share theirs.

    A layer takes part if its parameters are random, its own (not tied), and it runs once in a forward pass.

    Args:
        module: a network in evaluation mode.
        shared: parameters and buffers that are not random.
        example: one input for forward passes, to see which layers run, and on what.
    """

    def __init__(self, module: nn.Module, shared: Mapping[str, Tensor], example: Tensor) -> None:
        layers = {n: m for n, m in module.named_modules() if type(m) in _LAYERS}
        random = {n for n, _ in module.named_parameters() if n not in shared}
        self.module, self.shared = module, shared
        self.layers = own_layers(module, layers, random, example)
        self.per_input = _batch_first(module, self.layers, example)
        self.own = {parameter_name(name, n) for name, layer in self.layers.items() for n, _ in layer.named_parameters()}

    def __call__(self, mean: Mapping[str, Tensor], noise: Mapping[str, Tensor], x: Tensor) -> Any:
        """The network's output at means plus noise; signs come from torch's global generator."""
        values = {n: m if n in self.own else m + noise[n] for n, m in mean.items()}
        handles = [
            layer.register_forward_hook(
                self._add(name, noise, len(x) if name in self.per_input else None), with_kwargs=True
            )
            for name, layer in self.layers.items()
        ]
        try:
            return functional_call(self.module, {**self.shared, **values}, (x,))
        finally:
            for handle in handles:
                handle.remove()

    @staticmethod
    def _add(name: str, noise: Mapping[str, Tensor], count: int | None) -> Any:
        weight, bias = noise[parameter_name(name, "weight")], noise.get(parameter_name(name, "bias"))

        def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            x = first_input(args, kwargs)
            signs = _signs if len(x) == count else _no_signs  # rows of one input (tokens side by side) share its noise
            if isinstance(layer, nn.Linear):
                before, after = (len(x), *[1] * (x.ndim - 2), x.shape[-1]), (len(x), *[1] * (x.ndim - 2), len(weight))
                moved = nn.functional.linear(x * signs(before, x), weight, bias)
            else:
                before, after = (*x.shape[:2], *[1] * (x.ndim - 2)), (*output.shape[:2], *[1] * (x.ndim - 2))
                moved = layer._conv_forward(x * signs(before, x), weight, bias)
            return output + moved * signs(after, output)

        return hook


def _batch_first(module: nn.Module, layers: Mapping[str, nn.Module], example: Tensor) -> set[str]:
    """Layers whose first dimension is the batch: noise that varies over time steps is not a draw of the weights."""
    rows: dict[str, int] = {}

    def hook(name: str) -> Callable[..., None]:
        return lambda _layer, args, kwargs: rows.update({name: len(first_input(args, kwargs))})

    handles = [layer.register_forward_pre_hook(hook(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        with torch.no_grad(), unfused():
            module(example.to(next(module.parameters()).device))
    finally:
        for handle in handles:
            handle.remove()
    return {name for name, count in rows.items() if count == len(example)}


def _signs(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device).bernoulli_(0.5) * 2 - 1


def _no_signs(shape: tuple[int, ...], like: Tensor) -> Tensor:  # noqa: ARG001
    return torch.ones((), dtype=like.dtype, device=like.device)
