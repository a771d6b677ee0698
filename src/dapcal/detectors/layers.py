"""Outputs of hidden layers as points, caught in the forward passes of a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dapcal.networks import execution_order

KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def weight_layers(network: nn.Module, x: Tensor) -> list[str]:
    """Names of the linear and convolutional layers that run just once on x, in the order in which they do."""
    layers = {n: m for n, m in network.named_modules() if isinstance(m, KINDS)}
    order = execution_order(network, layers, x)
    return [name for name in order if order.count(name) == 1]


def spread_out(names: Sequence[str], number: int) -> list[str]:
    """At most `number` of some names, evenly spaced, with the first and the last of them.

    >>> spread_out("abcdefg", 3), spread_out("ab", 3)
    (['a', 'd', 'g'], ['a', 'b'])
    """
    if len(names) <= number:
        return list(names)
    return [names[round(i * (len(names) - 1) / max(1, number - 1))] for i in range(number)]


@contextmanager
def outputs_of(network: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Points (N, P) that some layers gave in the last forward pass of the body, by name."""
    seen: dict[str, Tensor] = {}

    def remember(name: str, layer: nn.Module) -> None:
        handles.append(layer.register_forward_hook(lambda _, __, output: seen.update({name: as_points(layer, output)})))

    handles: list = []
    for name in names:
        remember(name, network.get_submodule(name))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def as_points(layer: nn.Module, output: Tensor) -> Tensor:
    """What a layer gave as (N, P), averaged over places: those of a convolution's map, or tokens; at least float32."""
    output = output.to(torch.promote_types(output.dtype, torch.float32))
    if output.ndim <= 2:
        return output
    return output.flatten(1, -2).mean(1) if isinstance(layer, nn.Linear) else output.flatten(2).mean(2)
