"""What is inside a module: its parameters as a flat vector, copies of it, layers that are its own."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dapcal.networks.hooks import execution_order
from dapcal.storing import Stores

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the parameters in a flat vector, in order."""

    stores = Stores()

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names) or len(self.names) != len(self.shapes):
            raise ValueError(
                f"Expected a shape for every name, and every name once, got {len(self.shapes)} shapes and "
                f"{len(self.names)} names"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Number of entries of each parameter."""
        return {n: math.prod(s) for n, s in zip(self.names, self.shapes, strict=True)}  # a file's may be beyond 2⁶³

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
    model = plain(model)
    _check_batch_norm(model)
    return copied(model).eval().requires_grad_(False)


def plain(model: nn.Module) -> nn.Module:
    """The network itself, in single precision: without `torch.compile` and `DataParallel`, which wrap it.

    Their wrappers put words before its names. Weights in half precision are converted, for what is done with outputs
    and draws needs more digits: a copy of the network with float32 weights.
    """
    inside: Any = model
    while True:
        if hasattr(inside, "_orig_mod"):
            inside = inside._orig_mod
        elif isinstance(inside, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inside = inside.module
        else:
            break
    if any(hasattr(module, "_orig_mod") for module in inside.modules()):
        inside = copied(inside)
        for name, module in list(inside.named_modules()):
            if hasattr(module, "_orig_mod"):
                inside.set_submodule(name.replace("._orig_mod", ""), module._orig_mod)
    _check_devices(inside)
    return copied(inside).float() if any(weight.dtype in HALF for weight in inside.parameters()) else inside


def copied(model: nn.Module) -> nn.Module:
    """A copy of a network, with weights of its own."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        told = " ".join(str(error).split()).partition(". ")[0][:160]
        raise ValueError(
            f"This network cannot be copied ({type(error).__name__}: {told}), and dapcal works on copies; make it "
            "copyable by copy.deepcopy, e.g. with torch.nn.utils.parametrizations in place of hooks that set weights"
        ) from error


def split_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Copies of the parameters that are learnt, and of all else (frozen parameters, buffers), by name."""
    model = plain(model)
    _check_batch_norm(model)
    learnt = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    if not learnt:
        way = "unfreeze some" if any(True for _ in model.parameters()) else "fit before quantising it"
        raise ValueError(f"Expected a model with parameters that require a gradient, got none; {way}")
    rest = [*model.named_parameters(), *model.named_buffers()]
    return learnt, {n: t.detach().clone() for n, t in rest if n not in learnt}


def _check_devices(model: nn.Module) -> None:
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1 or devices == ["meta"]:
        raise ValueError(
            f"Expected a network on one device, got {' and '.join(devices)}; load it without a `device_map` over "
            "several devices and without offloading, or move it with .to(device)"
        )


def _check_batch_norm(model: nn.Module) -> None:
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    batchwise = [n for n, m in layers.items() if m.running_mean is None]
    if batchwise:
        raise ValueError(
            f"Expected batch norm with running statistics, but {batchwise} use those of the batch: a prediction would "
            "depend on the inputs beside it; use track_running_stats=True, nn.GroupNorm or nn.LayerNorm"
        )


def same_weights(one: nn.Module, two: nn.Module) -> bool:
    """Whether two networks have parameters and buffers of the same names and values."""
    a, b = one.state_dict(), two.state_dict()
    return one is two or (a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a))


def own_layers(
    network: nn.Module, layers: Mapping[str, nn.Module], random: Container[str], x: Tensor
) -> dict[str, nn.Module]:
    """Those of some layers whose parameters are random and their own (not tied), and which run once on x."""
    runs = Counter(execution_order(network, layers, x))
    uses = Counter(id(p) for m in network.modules() for p in m.parameters(recurse=False))
    return {
        name: layer
        for name, layer in layers.items()
        if runs[name] == 1
        and all(uses[id(p)] == 1 and parameter_name(name, n) in random for n, p in layer.named_parameters())
    }


def parameter_name(module: str, parameter: str) -> str:
    """The name in a network of a parameter of one of its modules; a network that is the module itself is ``""``."""
    return f"{module}.{parameter}" if module else parameter
