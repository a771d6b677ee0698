"""A module evaluated with parameters from outside: one vector per draw, many draws at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import RLock

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dapcal.errors import NotOutputs
from dapcal.mapped import Rows, rows_like
from dapcal.networks.hooks import entering, unfused
from dapcal.networks.passes import Pass
from dapcal.networks.running import running
from dapcal.networks.tabular import PiecewiseLinear, Scaled, Tempered

MEMORY = 2**28  # bytes of activations that one step may take, about
_SWAPPED = RLock()  # while other parameters stand in a module, which every thread would run with


def evaluate(
    model: nn.Module,
    draws: Mapping[str, Tensor],
    shared: Mapping[str, Tensor],
    x: Tensor,
    batch_size: int = 512,
    first: Pass | None = None,
    every: Pass | None = None,
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
        first: the first draw is the network of this pass: what enters its layers is kept there, where draws run one by
            one.
        every: what enters the layers that this pass wants by draw is kept there, of all draws.
    """
    count, device = len(next(iter(draws.values()))), next(iter(draws.values())).device
    widest = max((p.shape[-2] for p in draws.values() if p.ndim == 3), default=1)  # of the linear layers

    def forward(own: dict[str, Tensor], batch: Tensor) -> Tensor:
        with _SWAPPED:
            return as_tensor(functional_call(model, {**shared, **own}, (batch,)))

    caught: dict[str, Rows] = {} if first is None else {name: rows_like(x) for name in first.wanted}
    by_draw: dict[str, Rows] = {} if every is None else {name: rows_like(x, 1) for name in every.by_draw_wanted}
    layers = {name: model.get_submodule(name) for name in {**caught, **by_draw}}

    def with_layers(own: dict[str, Tensor], batch: Tensor, names: Collection[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs, and what entered layers that ran once."""
        entered: dict[str, list[Tensor]] = {name: [] for name in names}
        with (
            entering({name: layers[name] for name in names}, lambda name, z: entered[name].append(z)),
            unfused() if names else nullcontext(),
        ):
            outputs = forward(own, batch)
        return outputs, {name: found[0] for name, found in entered.items() if len(found) == 1}

    def all_at_once(batch: Tensor) -> Tensor:
        chunk = max(1, MEMORY // (max(1, len(batch) * widest) * 4 * 4))
        run = partial(with_layers, names=by_draw)
        with vectorising():
            outputs, entered = vmap(run, in_dims=(0, None), chunk_size=min(chunk, count))(dict(draws), batch)
        for name, z in entered.items():
            by_draw[name].append(z)
        return outputs

    def one_by_one(batch: Tensor) -> Tensor:
        outputs, entered = [], []
        for s in range(count):
            names = layers if s == 0 else by_draw
            found, z = with_layers({n: d[s] for n, d in draws.items()}, batch, names)
            outputs.append(found)
            entered.append(z)
        for name in caught.keys() & entered[0].keys():
            caught[name].append(entered[0][name])
        for name in by_draw:
            if all(name in z for z in entered):
                by_draw[name].append(torch.stack([z[name] for z in entered]))
        return torch.stack(outputs)

    with torch.no_grad():
        chain = dense_chain(model, x)
        if chain is not None:
            batch_size = max(1, min(batch_size, MEMORY // (count * widest * 4 * 4)))
            run: Callable[[Tensor], Tensor] = partial(_run_chain, chain, draws, shared, by_draw)
        elif vectorises(model, forward, draws, x[:1].to(device)):
            run = all_at_once
        else:
            run = one_by_one
        parts = []
        for batch in x.split(batch_size):
            with running(model, batch):
                outputs = run(batch.to(device))
            parts.append(check_outputs(outputs, len(batch)))
        found = torch.cat(parts, 1)
    if first is not None:
        first.keep(caught)
    if every is not None:
        every.keep_by_draw(by_draw)
    return found


_ELEMENTWISE = (
    nn.Tanh, nn.ReLU, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.Softplus, nn.LeakyReLU, nn.Identity, nn.Dropout,
    Tempered,
)  # fmt: skip


def dense_chain(model: nn.Module, x: Tensor) -> list[tuple[str, nn.Module]] | None:
    """The layers of a chain of linear layers and elementwise functions on inputs x, by name; None for other models."""
    layers = _flattened(model)
    if layers is None or not any(isinstance(m, nn.Linear) for _, m in layers):
        return None
    rows = x.ndim == 2 or _is_flatten(layers[0][1])
    weights = [id(weight) for _, layer in layers for weight in layer._parameters.values() if weight is not None]
    tied = len(set(weights)) < len(weights)
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return layers if rows and not tied and not hooked and not any(_is_flatten(m) for _, m in layers[1:]) else None


def _flattened(model: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """The layers of nested `nn.Sequential`s, if all are linear or elementwise."""
    layers: list[tuple[str, nn.Module]] = []
    # `named_children` would leave out a module that comes again, as one activation for all layers does
    for name, module in model._modules.items() if type(model) is nn.Sequential else ():
        assert module is not None
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
    chain: list[tuple[str, nn.Module]],
    draws: Mapping[str, Tensor],
    shared: Mapping[str, Tensor],
    by_draw: Mapping[str, Rows],
    x: Tensor,
) -> Tensor:
    """Outputs (S, N, C): the first random layer is one product with the weights of all draws side by side."""
    h, count = x, len(next(iter(draws.values())))
    for name, module in chain:
        if name in by_draw:
            by_draw[name].append(h if h.ndim == 3 else h.expand(count, *h.shape))
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


@contextmanager
def backward_in_evaluation(model: nn.Module) -> Iterator[None]:
    """Recurrent layers on a GPU: cuDNN refuses their gradients in evaluation mode, torch's own kernels do not."""
    recurrent = not model.training and any(isinstance(m, nn.RNNBase) for m in model.modules())
    with torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext():
        yield


def as_tensor(output: object) -> Tensor:
    """The output of a model: a tensor, or the `logits` of a mapping or object that has them (Hugging Face)."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    found = output if logits is None else logits
    if not isinstance(found, Tensor):
        raise NotOutputs(
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
            "that flattens (for a class at every place nn.Flatten(), with dapcal.likelihoods.PerPlace)"
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
            "flattens (for a class at every place nn.Flatten(), with dapcal.likelihoods.PerPlace)"
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


_MATRIX_LAYERS = (nn.Linear, nn.LayerNorm, nn.BatchNorm1d, PiecewiseLinear, Scaled)


def _is_matrix_network(model: nn.Module) -> bool:
    return all(isinstance(m, _MATRIX_LAYERS) for m in model.modules() if any(True for _ in m.parameters(False)))
