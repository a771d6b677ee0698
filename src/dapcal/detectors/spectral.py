"""Soft spectral normalisation: layers that may shorten distances, and lengthen them at most `bound` times."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

START = 30  # power iterations before the first step; training adds one a forward pass


def normalised(
    network: nn.Module, bound: float = 3.0, *, last: bool = False, example: Tensor | None = None
) -> nn.Module:
    """A copy whose `nn.Linear` and `nn.Conv2d` weights are W / max(1, σ(W)/bound), σ the largest singular value.

    Soft normalisation as in SNGP (Liu et al. 2020, arXiv:2006.10108) and DDU (Mukhoti et al. 2021, arXiv:2102.11582).
    σ(W) = ‖W v‖ with v from power iteration, v ← WᵀW v/‖WᵀW v‖, once a forward pass in training mode; v is a buffer.
    A convolution's σ is that of the operator on images of the size seen (Gouk et al. 2018, arXiv:1804.04368): the
    kernel reshaped to a matrix has a σ that is neither above nor below it, and does not bound distances.

    Batch norm stays free. The copy trains like any network (`dapcal.posteriors.map.fit`); `plain` makes it one.

    Args:
        network: left as it is.
        bound: largest σ of a layer.
        last: normalise the last layer (in order of registration) too; without, the head is free.
        example: inputs (N, ...) of the size to come; convolutions need them.
    """
    if not bound > 0:
        raise ValueError(f"Expected `bound` > 0, got {bound}")
    result = copy.deepcopy(network)
    layers = {n: m for n, m in result.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    if any(_bounds(layer) for layer in layers.values()):
        raise ValueError("Expected a network that is not normalised yet; make it `plain` first")
    if layers and not last:
        layers.popitem()
    shapes = _image_shapes(network, [n for n, m in layers.items() if isinstance(m, nn.Conv2d)], example)
    for name, layer in layers.items():
        mode = layer.training
        bounded = _Bounded(*_operator(name, layer, shapes.get(name)), bound, layer.weight.detach())
        parametrize.register_parametrization(layer, "weight", bounded)
        layer.train(mode)
    return result


def plain(network: nn.Module) -> nn.Module:
    """A copy of a normalised network with the weights that it uses in evaluation mode, and no parametrisation."""
    result = copy.deepcopy(network)
    for layer in [m for m in result.modules() if _bounds(m)]:
        mode, own = layer.training, type(layer)
        # copies share the class that holds `weight` as a property, and torch removes it from the class
        layer.__class__ = type(own.__name__, own.__bases__, dict(own.__dict__))
        parametrize.remove_parametrizations(layer.eval(), "weight", leave_parametrized=True)
        layer.train(mode)
    return result


class _Bounded(nn.Module):
    """W ↦ W / max(1, ‖W v‖/bound)."""

    direction: Tensor

    def __init__(
        self, operator: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...], bound: float, weight: Tensor
    ) -> None:
        super().__init__()
        self.operator, self.bound = operator, bound
        start = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        self.register_buffer("direction", start / start.norm())
        own = weight.cpu()  # there bit for bit the same every time, so that a killed run finds its checkpoint
        for _ in range(START):
            self.direction.copy_(self._iterated(own))
        self.to(weight.device)

    def forward(self, weight: Tensor) -> Tensor:
        direction = self.direction
        with torch.autocast(weight.device.type, enabled=False):
            if self.training:
                direction = self._iterated(weight.detach())
                self.direction.copy_(direction)  # `direction` itself stays as the backward pass needs it
            return weight / (self.operator(direction, weight).norm() / self.bound).clamp_min(1)

    def _iterated(self, weight: Tensor) -> Tensor:
        """One power iteration; WᵀW v is the gradient of ½‖W v‖², whatever the layer."""
        with torch.enable_grad():
            direction = self.direction.clone().requires_grad_()
            image = self.operator(direction, weight)
            (back,) = torch.autograd.grad(image, direction, image.detach())
        length = back.norm()
        return torch.where(length > 0, back / length, self.direction)  # weights of zero have no direction

    def extra_repr(self) -> str:
        return f"bound={self.bound}, input={tuple(self.direction.shape[1:])}"


def _bounds(layer: nn.Module) -> bool:
    return parametrize.is_parametrized(layer, "weight") and any(
        isinstance(part, _Bounded)
        for part in layer.parametrizations.weight  # type: ignore[union-attr]
    )


def _operator(
    name: str, layer: nn.Linear | nn.Conv2d, shape: tuple[int, ...] | None
) -> tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]:
    """The layer without bias as a function of (v, W), and the shape of v."""
    if isinstance(layer, nn.Linear):
        return functional.linear, (layer.in_features,)
    if shape is None:
        raise ValueError(f"Expected `example` inputs that reach the convolution `{name}`, got none; pass some, x[:1]")
    if layer.padding_mode != "zeros":
        raise ValueError(f"Expected the convolution `{name}` with zero padding, got {layer.padding_mode!r}")
    settings = {k: getattr(layer, k) for k in ("stride", "padding", "dilation", "groups")}
    return partial(functional.conv2d, **settings), shape


def _image_shapes(network: nn.Module, names: list[str], example: Tensor | None) -> dict[str, tuple[int, ...]]:
    """Shapes (C, H, W) of what enters some convolutions."""
    shapes: dict[str, tuple[int, ...]] = {}
    if example is None or not names:
        return shapes
    probe = copy.deepcopy(network).eval()
    for name in names:
        probe.get_submodule(name).register_forward_pre_hook(
            lambda _, inputs, name=name: shapes.update({name: tuple(inputs[0].shape[1:])})
        )
    with torch.no_grad():
        probe(example[:1].to(next(probe.parameters()).device))
    return shapes
