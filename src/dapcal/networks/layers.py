"""Which layer's input serves as features: the last linear one, or what comes closest to it."""

from __future__ import annotations

from collections.abc import Container

from torch import Tensor, nn

from dapcal.networks.hooks import execution_order


def last_linear(network: nn.Module, x: Tensor) -> str:
    """Name of the linear layer that runs last."""
    found = _last(network, x, None, (nn.Linear,))
    if found is None:
        raise ValueError(f"Found no nn.Linear layer that runs; the layers are {layer_names(network)}")
    return found


def feature_layer(network: nn.Module, x: Tensor, aware: Container[str] | None = None) -> tuple[str, bool]:
    """Name of the layer whose input serves as features, and whether that is averaged over places.

    The linear layer that runs last. A network without one ends in a convolution and an average over places: what
    enters the last convolution, averaged, is then what a linear layer after the average would see.

    Args:
        network: any module.
        x: one input or more.
        aware: names of parameters; layers that have some of them are preferred.
    """
    linear = _last(network, x, aware, (nn.Linear,))
    if linear is not None:
        return linear, False
    convolution = _last(network, x, aware, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    if convolution is None:
        raise ValueError(
            "Found no linear or convolutional layer whose input could serve as features; name a layer with "
            f"Features(layer=...), one of {layer_names(network)}"
        )
    return convolution, True


def layer_names(network: nn.Module) -> list[str]:
    """Of the layers that hold no others."""
    return [n for n, m in network.named_modules() if n and not any(True for _ in m.children())]


def _last(
    network: nn.Module, x: Tensor, aware: Container[str] | None, kinds: tuple[type[nn.Module], ...]
) -> str | None:
    beside = _adapters(network)
    layers = {n: m for n, m in network.named_modules() if isinstance(m, kinds) and n not in beside}
    if aware is not None:
        layers = {n: m for n, m in layers.items() if f"{n}.weight" in aware} or layers
    order = execution_order(network, layers, x)
    return order[-1] if order else None


def _adapters(network: nn.Module) -> set[str]:
    """Layers beside the one that they adapt (LoRA), which see it through a few directions alone."""
    wrappers = [n for n, m in network.named_modules() if isinstance(getattr(m, "base_layer", None), nn.Module)]
    names = [n for n, _ in network.named_modules()]
    return {n for w in wrappers for n in names if n.startswith(f"{w}.") and not f"{n}.".startswith(f"{w}.base_layer.")}
