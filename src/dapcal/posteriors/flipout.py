"""Flipout: every input of a minibatch sees weight noise of its own signs, for the price of two passes.

    y = x μᵀ + ((x ∘ s) Δᵀ) ∘ r,   Δ = σ ∘ ε,   s, r random signs per input.

Gradients stay unbiased and vary less than with one Δ for the whole minibatch (Wen et al. 2018).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dapcal.networks import execution_order

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Flipout:
    """A network whose linear and convolutional layers add flipout noise; other parameters share theirs.

    A layer takes part if its parameters are random, its own (not tied), and it runs once in a forward pass.

    Args:
        module: a network in evaluation mode.
        shared: parameters and buffers that are not random.
        example: inputs for one forward pass, to see which layers run.
    """

    def __init__(self, module: nn.Module, shared: Mapping[str, Tensor], example: Tensor) -> None:
        layers = {n: m for n, m in module.named_modules() if type(m) in _LAYERS}
        runs = Counter(execution_order(module, layers, example))
        uses = Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
        self.module, self.shared = module, shared
        self.layers = {
            name: layer
            for name, layer in layers.items()
            if runs[name] == 1
            and all(uses[id(p)] == 1 and _path(name, n) not in shared for n, p in layer.named_parameters())
        }
        self.own = {_path(name, n) for name, layer in self.layers.items() for n, _ in layer.named_parameters()}

    def __call__(self, mean: Mapping[str, Tensor], noise: Mapping[str, Tensor], x: Tensor) -> Any:
        """The network's output at means plus noise; signs come from torch's global generator."""
        values = {n: m if n in self.own else m + noise[n] for n, m in mean.items()}
        handles = [layer.register_forward_hook(self._add(name, noise, len(x))) for name, layer in self.layers.items()]
        try:
            return functional_call(self.module, {**self.shared, **values}, (x,))
        finally:
            for handle in handles:
                handle.remove()

    @staticmethod
    def _add(name: str, noise: Mapping[str, Tensor], count: int) -> Any:
        weight, bias = noise[_path(name, "weight")], noise.get(_path(name, "bias"))

        def hook(layer: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            (x,) = inputs
            signs = _signs if len(x) == count else _no_signs  # rows of one input (tokens side by side) share its noise
            if isinstance(layer, nn.Linear):
                before, after = (len(x), *[1] * (x.ndim - 2), x.shape[-1]), (len(x), *[1] * (x.ndim - 2), len(weight))
                moved = nn.functional.linear(x * signs(before, x), weight, bias)
            else:
                before, after = (*x.shape[:2], *[1] * (x.ndim - 2)), (*output.shape[:2], *[1] * (x.ndim - 2))
                moved = layer._conv_forward(x * signs(before, x), weight, bias)
            return output + moved * signs(after, output)

        return hook


def _path(layer: str, parameter: str) -> str:
    return f"{layer}.{parameter}" if layer else parameter  # the model itself may be a layer


def _signs(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device).bernoulli_(0.5) * 2 - 1


def _no_signs(shape: tuple[int, ...], like: Tensor) -> Tensor:  # noqa: ARG001
    return torch.ones((), dtype=like.dtype, device=like.device)
