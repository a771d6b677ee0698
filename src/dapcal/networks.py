"""A module evaluated with parameters from outside: one vector per draw, many draws at once."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dapcal.storing import Stores

MEMORY = 2**28  # bytes of activations that one step may take, about


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the parameters in a flat vector, in order."""

    stores = Stores()

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
    _check_batch_norm(model)
    return copy.deepcopy(model).eval().requires_grad_(False)


def split_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Copies of the parameters that are learnt, and of all else (frozen parameters, buffers), by name."""
    _check_batch_norm(model)
    learnt = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    if not learnt:
        raise ValueError("Expected a model with parameters that require a gradient, got none; unfreeze some")
    rest = [*model.named_parameters(), *model.named_buffers()]
    return learnt, {n: t.detach().clone() for n, t in rest if n not in learnt}


def _check_batch_norm(model: nn.Module) -> None:
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    batchwise = [n for n, m in layers.items() if m.running_mean is None]
    if batchwise:
        raise ValueError(
            f"Expected batch norm with running statistics, but {batchwise} use those of the batch: a prediction would "
            "depend on the inputs beside it; use track_running_stats=True, nn.GroupNorm or nn.LayerNorm"
        )


def evaluate(
    model: nn.Module,
    draws: Mapping[str, Tensor],
    shared: Mapping[str, Tensor],
    x: Tensor,
    batch_size: int = 512,
) -> Tensor:
    """Outputs (S, N, C) of S draws at N inputs.

    A plain chain of linear layers runs all draws of a batch at once, its first layer as one matrix product; other
    networks of matrix products do so by `vmap`. All else (convolutions, recurrences) runs draw by draw, which is faster
    for it: grouped convolutions cost two to three times a plain loop on a CPU.

    Args:
        model: a module in evaluation mode.
        draws: parameters and buffers that differ between draws, each (S, ...).
        shared: those that do not.
        x: inputs (N, ...).
        batch_size: inputs per step; bounds the memory of activations together with `MEMORY`.
    """
    count, device = len(next(iter(draws.values()))), next(iter(draws.values())).device
    widest = max((p.shape[-2] for p in draws.values() if p.ndim == 3), default=1)  # of the linear layers

    def forward(own: dict[str, Tensor], batch: Tensor) -> Tensor:
        return as_tensor(functional_call(model, {**shared, **own}, (batch,)))

    def all_at_once(batch: Tensor) -> Tensor:
        chunk = max(1, MEMORY // (max(1, len(batch) * widest) * 4 * 4))
        with vectorising():
            return vmap(forward, in_dims=(0, None), chunk_size=min(chunk, count))(dict(draws), batch)

    def one_by_one(batch: Tensor) -> Tensor:
        return torch.stack([forward({n: d[s] for n, d in draws.items()}, batch) for s in range(count)])

    with torch.no_grad():
        chain = dense_chain(model, x)
        if chain is not None:
            batch_size = max(1, min(batch_size, MEMORY // (count * widest * 4 * 4)))
            run: Callable[[Tensor], Tensor] = partial(_run_chain, chain, draws, shared)
        elif vectorises(model, forward, draws, x[:1].to(device)):
            run = all_at_once
        else:
            run = one_by_one
        return torch.cat([check_outputs(run(batch.to(device)), len(batch)) for batch in x.split(batch_size)], 1)


_ELEMENTWISE = (
    nn.Tanh, nn.ReLU, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.Softplus, nn.LeakyReLU, nn.Identity, nn.Dropout,
)  # fmt: skip


def dense_chain(model: nn.Module, x: Tensor) -> list[tuple[str, nn.Module]] | None:
    """The layers of a chain of linear layers and elementwise functions on inputs x, by name; None for other models."""
    layers = _flattened(model)
    if layers is None or not any(isinstance(m, nn.Linear) for _, m in layers):
        return None
    rows = x.ndim == 2 or _is_flatten(layers[0][1])
    tied = len({id(p) for p in model.parameters()}) < len(list(model.named_parameters(remove_duplicate=False)))
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return layers if rows and not tied and not hooked and not any(_is_flatten(m) for _, m in layers[1:]) else None


def _flattened(model: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """The layers of nested `nn.Sequential`s, if all are linear or elementwise."""
    layers: list[tuple[str, nn.Module]] = []
    for name, module in model.named_children() if type(model) is nn.Sequential else ():
        if type(module) is nn.Linear or type(module) in _ELEMENTWISE or _is_flatten(module):
            layers.append((name, module))
            continue
        inner = _flattened(module)
        if inner is None:
            return None
        layers += [(f"{name}.{n}", m) for n, m in inner]
    return layers or None


def _is_flatten(module: nn.Module) -> bool:
    return isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1)


def _run_chain(
    chain: list[tuple[str, nn.Module]], draws: Mapping[str, Tensor], shared: Mapping[str, Tensor], x: Tensor
) -> Tensor:
    """Outputs (S, N, C): the first random layer is one product with the weights of all draws side by side."""
    h, count = x, len(next(iter(draws.values())))
    for name, module in chain:
        if not isinstance(module, nn.Linear):
            h = module(h)
            continue
        weight, bias = (draws.get(n, shared.get(n)) for n in (f"{name}.weight", f"{name}.bias"))
        assert weight is not None
        if h.ndim == 2 and weight.ndim == 3:
            h = (h @ weight.flatten(0, 1).T).unflatten(1, (count, -1)).transpose(0, 1)
        else:
            h = h @ weight.mT
        if bias is not None:
            h = h + (bias[:, None] if bias.ndim == 2 else bias)
    return h if h.ndim == 3 else h.expand(count, *h.shape)


def execution_order(network: nn.Module, modules: Mapping[str, nn.Module], x: Tensor) -> list[str]:
    """Names of some of a network's modules in the order in which they run on x."""
    order: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda _module, _inputs, name=name: order.append(name))
        for name, module in modules.items()
    ]
    try:
        with torch.no_grad(), unfused():
            network(x.to(next(network.parameters()).device))
    finally:
        for handle in handles:
            handle.remove()
    return order


@contextmanager
def unfused() -> Iterator[None]:
    """Transformer layers in evaluation mode may run as one kernel, which calls no hooks inside."""
    with _LOCK:  # one setting for all threads: the first inside sets it, the last one gives it back
        _UNFUSED.append(_UNFUSED[0] if _UNFUSED else torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _LOCK:
            before = _UNFUSED.pop()
            if not _UNFUSED:
                torch.backends.mha.set_fastpath_enabled(before)


_UNFUSED: list[bool] = []  # for every thread inside, what was set before the first
_LOCK = Lock()


def same_weights(one: nn.Module, two: nn.Module) -> bool:
    """Whether two networks have parameters and buffers of the same names and values."""
    a, b = one.state_dict(), two.state_dict()
    return one is two or (a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a))


@contextmanager
def backward_in_evaluation(model: nn.Module) -> Iterator[None]:
    """Recurrent layers on a GPU: cuDNN refuses their gradients in evaluation mode, torch's own kernels do not."""
    recurrent = not model.training and any(isinstance(m, nn.RNNBase) for m in model.modules())
    with torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext():
        yield


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


def first_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """What a layer was called with first, by position or by name."""
    return args[0] if args else next(iter(kwargs.values()))


def as_tensor(output: object) -> Tensor:
    """The output of a model: a tensor, or the `logits` of a mapping or object that has them (Hugging Face)."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    found = output if logits is None else logits
    if not isinstance(found, Tensor):
        raise TypeError(
            f"Expected the model to return a tensor (N, C), got {type(found).__name__}; return the outputs alone, or a "
            "mapping or object that has them as `logits`"
        )
    return found


def check_outputs(outputs: Tensor, n: int) -> Tensor:
    """Outputs (S, N, C) of S draws at n inputs, finite; a model that returns (N,) has one output."""
    if outputs.ndim == 2:
        outputs = outputs[..., None]
    if outputs.ndim != 3 or outputs.shape[1] != n:
        raise ValueError(
            f"Expected the model to return ({n}, C) for {n} inputs, got {tuple(outputs.shape[1:])}; add a final layer "
            "that flattens"
        )
    if not outputs.isfinite().all():
        raise ValueError("The model returned NaN or inf; check its weights and the scale of the inputs")
    return outputs


def checked_outputs(output: object, n: int) -> Tensor:
    """What a model returned for n inputs as finite outputs (n, C)."""
    return check_outputs(as_tensor(output)[None], n)[0]


def one_column(outputs: Tensor) -> Tensor:
    """A model that returns (N,) has one output, (N, 1); other shapes than (N, C) are refused."""
    outputs = outputs[:, None] if outputs.ndim == 1 else outputs
    if outputs.ndim != 2:
        raise ValueError(
            f"Expected the model to return (N, C) for N inputs, got {tuple(outputs.shape)}; add a final layer that "
            "flattens"
        )
    return outputs


def vectorises(
    model: nn.Module, forward: Callable[[dict[str, Tensor], Tensor], Tensor], draws: Mapping[str, Tensor], x: Tensor
) -> bool:
    """Whether `vmap` should run all draws at once: a network of matrix products, which it can run.

    Control flow that looks at activations stops `vmap`.
    """
    if not _is_matrix_network(model):
        return False
    try:
        with vectorising(), torch.no_grad():
            vmap(forward, in_dims=(0, None))({n: d[:1] for n, d in draws.items()}, x)
    except RuntimeError:
        return False
    return True


@contextmanager
def vectorising() -> Iterator[None]:
    """Around `vmap`: attention in the one form that it knows, and no remark on kernels that it runs one by one."""
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


_MATRIX_LAYERS = (nn.Linear, nn.LayerNorm, nn.BatchNorm1d)


def _is_matrix_network(model: nn.Module) -> bool:
    return all(isinstance(m, _MATRIX_LAYERS) for m in model.modules() if any(True for _ in m.parameters(False)))
