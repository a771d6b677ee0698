"""A head that runs at every place of a text runs once instead, on what the network makes of the places.

Some classifiers (GPT-2 and others that read from left to right) apply their last layer to every token and then take the
answer at one of them, or their mean. Taking first and applying then is the same for a linear layer, and gives it one
input: features (N, D), and a last layer that outputs are linear in. It is done to a copy that shares all other layers,
and only if outputs stay the same.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dapcal.networks.evaluation import as_tensor
from dapcal.networks.hooks import entering, unfused
from dapcal.networks.layers import last_linear
from dapcal.networks.layout import frozen_copy
from dapcal.networks.running import run


class OnceAlone(nn.Linear):
    """A linear layer that hands on what has places, (N, length, D), and is applied to (N, D)."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What has places does not count as a run: no hook sees it."""
        has_places = len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0].ndim > 2
        return args[0] if has_places else super().__call__(*args, **kwargs)


@dataclass(frozen=True)
class ThenHead:
    """A hook that runs after a network: its head is applied to what came out."""

    layer: str

    def __call__(self, network: nn.Module, _: tuple[Any, ...], output: Any) -> Any:
        """The output with logits in place of features."""
        logits = network.get_submodule(self.layer)(as_tensor(output))
        if isinstance(output, Tensor):
            return logits
        if isinstance(output, Mapping) and not hasattr(output, "logits"):
            return {**output, "logits": logits}
        found = copy.copy(output)
        found.logits = logits
        return found


def head_of(network: object) -> str | None:
    """The head that is applied at the end; None where the network is as it was given."""
    hooks = network._forward_hooks.values() if isinstance(network, nn.Module) else ()
    return next((hook.layer for hook in hooks if isinstance(hook, ThenHead)), None)


def with_head_last(network: nn.Module, layer: str | None) -> nn.Module:
    """The network with its head applied at the end; it shares its other layers with the one that was given."""
    if layer is None or head_of(network) == layer:
        return network
    own = parent = _light(network)
    *path, last = layer.split(".")
    for name in path:
        inner = parent._modules[name]
        assert inner is not None
        parent._modules[name] = parent = _light(inner)
    head = copy.copy(parent._modules[last])
    assert head is not None
    head.__class__ = OnceAlone
    parent._modules[last] = head
    own.register_forward_hook(ThenHead(layer))
    return own


def head_at_places(network: nn.Module, x: Tensor) -> str | None:
    """The last linear layer, if it runs at every place of inputs x and could as well be applied at the end."""
    frozen = frozen_copy(network)
    try:
        layer = last_linear(frozen, x[:1])
    except ValueError:
        return None
    seen: list[Tensor] = []
    with torch.no_grad(), unfused(), entering({layer: frozen.get_submodule(layer)}, lambda _, z: seen.append(z)):
        expected = run(frozen, x)
    if len(seen) != 1 or seen[0].ndim != 3 or type(frozen.get_submodule(layer)) is not nn.Linear:
        return None
    try:
        with torch.no_grad():
            found = as_tensor(run(with_head_last(frozen, layer), x))
        same = torch.allclose(found, as_tensor(expected), rtol=1e-4, atol=1e-5)
    except (ValueError, TypeError):  # what comes after the layer wants its outputs
        return None
    return layer if same else None


def _light(module: nn.Module) -> nn.Module:
    """A copy that shares parameters and children, but not which children and hooks it has."""
    own = copy.copy(module)
    for name, value in vars(own).items():
        if isinstance(value, dict) and ("hooks" in name or name == "_modules"):
            own.__dict__[name] = OrderedDict(value)
    return own
