"""Sums over the training data that a Laplace approximation is made of: for a whole network, and for a last layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader

from dapcal.data import Labelled, pairs_of
from dapcal.likelihoods import Likelihood
from dapcal.networks import (
    MEMORY,
    Layout,
    backward_in_evaluation,
    checked_outputs,
    first_input,
    own_layers,
    parameter_name,
)
from dapcal.posteriors._curvature.structures import Curvature, Diagonal, Factors, Full, Kronecker, Root, factors
from dapcal.posteriors.linear import LastLayer, center_outputs, layer_index, pulled_back, tracked
from dapcal.prior import Prior


class Setting(NamedTuple):
    """A trained network with what is random in it."""

    model: nn.Module  # frozen, in evaluation mode
    shared: dict[str, Tensor]
    layout: Layout
    center: Tensor  # (P,)
    likelihood: Likelihood
    prior: Prior
    root: Root

    @property
    def state(self) -> dict[str, Tensor]:
        """All parameters and buffers."""
        return {**self.shared, **self.layout.unflatten(self.center)}


def batches(data: Labelled | DataLoader, batch_size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """One pass over the training data, in order."""
    if batch_size < 1:
        raise ValueError(f"Expected `batch_size` >= 1, got {batch_size}")
    pairs = (
        pairs_of(data, "train")
        if isinstance(data, DataLoader)
        else zip(data.x.split(batch_size), data.y.split(batch_size), strict=True)
    )
    for x, y in pairs:
        yield tracked(x.to(device)), tracked(y.to(device))


LARGEST = 20_000  # parameters of a full covariance: 3 GiB a matrix, of which a few are needed


def check_full(parameters: int) -> None:
    """A full covariance of many parameters is refused before it fills the memory."""
    if parameters > LARGEST:
        raise ValueError(
            f"Expected at most {LARGEST} parameters for a full covariance, got {parameters}; use "
            "structure=laplace.Kronecker"
        )


# The whole network


def diagonal(setting: Setting, data: Labelled | DataLoader, batch_size: int) -> Diagonal:
    """Σ (Jᵀ R)² over inputs and columns."""
    return Diagonal(_diagonal(setting, data, batch_size))


def full(setting: Setting, data: Labelled | DataLoader, batch_size: int) -> Full:
    """Σ (Jᵀ R)(Jᵀ R)ᵀ."""
    size = len(setting.center)
    check_full(size)
    total = torch.zeros(size, size, dtype=torch.float64, device=setting.center.device)
    for pulled in _pulled(setting, data, batch_size):
        rows = pulled.flatten(0, 1).double()  # float32 sums would swamp the directions that data say little about
        total += rows.T @ rows
    return Full(total)


def kronecker(setting: Setting, data: Labelled | DataLoader, batch_size: int) -> Kronecker:
    """G ⊗ A of the layers that can be factored, the diagonal of the rest."""
    layers: dict[str, _Layer] = {}
    order: dict[str, nn.Module] | None = None
    for x, y in batches(data, batch_size, setting.center.device):
        if order is None:
            order = _factorable(setting, x[:1])
            layers = {name: _Layer(module) for name, module in order.items()}
        if layers:
            _add_batch(setting, layers, x, y)
    found, taken = [], set()
    for name, layer in layers.items():
        found += layer.factors(setting.layout, name, setting.prior)
        taken |= {parameter_name(name, n) for n, _ in layer.module.named_parameters(recurse=False)}
    rest = tuple(n for n in setting.layout.names if n not in taken)
    values = torch.zeros(len(setting.center), dtype=torch.float64, device=setting.center.device)
    if rest:
        values = _diagonal(_only(setting, rest), data, batch_size, setting.layout)
    return Kronecker(tuple(found), values)


def _diagonal(setting: Setting, data: Labelled | DataLoader, batch_size: int, into: Layout | None = None) -> Tensor:
    total = torch.zeros(len(setting.center), dtype=torch.float64, device=setting.center.device)
    for pulled in _pulled(setting, data, batch_size):
        total += pulled.square().sum((0, 1)).double()
    if into is None:
        return total
    parts = setting.layout.unflatten(total)
    zeros = {n: total.new_zeros(s) for n, s in zip(into.names, into.shapes, strict=True)}
    return into.flatten({**zeros, **parts})


def _pulled(setting: Setting, data: Labelled | DataLoader, batch_size: int) -> Iterator[Tensor]:
    """Jᵀ R of a few inputs at a time, (n, M, P)."""
    for x, y in batches(data, batch_size, setting.center.device):
        outputs = center_outputs(setting.model, setting.state, x)
        roots = setting.root(setting.likelihood, outputs, setting.likelihood.check(outputs, y))
        step = max(1, MEMORY // (8 * roots.shape[2] * len(setting.center)))
        for part, root in zip(x.split(step), roots.split(step), strict=True):
            yield pulled_back(setting.model, setting.shared, setting.layout, setting.center, part, root)


def _only(setting: Setting, names: tuple[str, ...]) -> Setting:
    """The same network with fewer random parameters."""
    own = setting.layout.unflatten(setting.center)
    shapes = dict(zip(setting.layout.names, setting.layout.shapes, strict=True))
    layout = Layout(names, tuple(shapes[n] for n in names))
    shared = {**setting.shared, **{n: t for n, t in own.items() if n not in names}}
    return setting._replace(shared=shared, layout=layout, center=layout.flatten(own))


def _factorable(setting: Setting, x: Tensor) -> dict[str, nn.Module]:
    """Linear and convolutional layers whose parameters are random, their own (not tied), and which run once."""
    candidates = {n: m for n, m in setting.model.named_modules() if _has_factors(m)}
    return own_layers(setting.model, candidates, setting.layout.names, x)


def _has_factors(module: nn.Module) -> bool:
    """Layers that multiply patches of their input with their weight; not subclasses or parametrised ones."""
    if not {"weight"} <= {n for n, _ in module.named_parameters()} <= {"weight", "bias"}:
        return False
    if type(module) is nn.Conv1d or type(module) is nn.Conv2d:
        return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return type(module) is nn.Linear


class _Layer:
    """Sums of one layer: A over its inputs, G over the gradients at its outputs."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.right: Tensor | None = None
        self.left: Tensor | None = None
        self.rows = 0
        self.seen: list[Tensor] = []

    def hook(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        self.add_inputs(first_input(args, kwargs).detach())
        self.seen.append(output)
        return output.clone()  # an activation in place would change it

    def add_inputs(self, x: Tensor) -> None:
        rows = _columns(self.module, x)
        if self.module.bias is not None:
            rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
        value = (rows.T @ rows).double()
        self.right = value if self.right is None else self.right + value
        self.rows += len(rows)

    def add_gradients(self, gradient: Tensor) -> None:
        moved = gradient if isinstance(self.module, nn.Linear) else gradient.movedim(1, -1)
        rows = moved.reshape(-1, moved.shape[-1])
        value = (rows.T @ rows).double()
        self.left = value if self.left is None else self.left + value

    def factors(self, layout: Layout, name: str, prior: Prior) -> list[Factors]:
        """One block, or weight and bias apart where they have different priors."""
        bias = self.module.bias is not None
        index = layer_index(layout, name, bias).to(prior.group.device)
        assert self.left is not None
        assert self.right is not None
        if bias and prior.group[index[0, 0]] != prior.group[index[0, -1]]:
            weight, own = slice(None, -1), slice(-1, None)
            return [factors(index[:, part], self.left, self.right[part, part], self.rows) for part in (weight, own)]
        return [factors(index, self.left, self.right, self.rows)]


def _columns(module: nn.Module, x: Tensor) -> Tensor:
    """What a layer multiplies with its weight matrix, one row per input and place."""
    if isinstance(module, nn.Linear):
        return x.reshape(-1, x.shape[-1])
    if isinstance(module, nn.Conv1d):
        sizes = [(1, *s) for s in (module.kernel_size, module.dilation, module.stride)]
        patches = nn.functional.unfold(x[:, :, None], sizes[0], sizes[1], (0, *module.padding), sizes[2])
    else:
        assert isinstance(module, nn.Conv2d)
        patches = nn.functional.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)  # type: ignore[arg-type]
    return patches.transpose(1, 2).flatten(0, 1)


def _add_batch(setting: Setting, layers: dict[str, _Layer], x: Tensor, y: Tensor) -> None:
    """One forward pass, and a backward pass for each column of the root."""
    handles = [layer.module.register_forward_hook(layer.hook, with_kwargs=True) for layer in layers.values()]
    state = {n: t.detach().requires_grad_(n in setting.layout.names) for n, t in setting.state.items()}
    try:
        with torch.enable_grad(), backward_in_evaluation(setting.model):
            outputs = checked_outputs(functional_call(setting.model, state, (x,)), len(x))
    finally:
        for handle in handles:
            handle.remove()
    detached = outputs.detach()
    roots = setting.root(setting.likelihood, detached, setting.likelihood.check(detached, y))
    ends = []
    for name, layer in layers.items():
        if len(layer.seen) != 1:
            raise ValueError(
                f"Expected layer `{name}` to run once for every batch, as it did for the first input, but it ran "
                f"{len(layer.seen)} times; use structure=laplace.Full or laplace.Diagonal"
            )
        ends.append(layer.seen.pop())
    for column in roots.unbind(2):
        # a layer whose result is not used has no gradient
        gradients = torch.autograd.grad(outputs, ends, column, True, allow_unused=True, materialize_grads=True)
        for layer, gradient in zip(layers.values(), gradients, strict=True):
            layer.add_gradients(gradient)


# A last layer: features and roots say it all


def last_layer(
    setting: Setting, linear: LastLayer, structure: type, data: Labelled | DataLoader, batch_size: int
) -> Curvature:
    """Σ_n R Rᵀ ⊗ φ φᵀ, from one forward pass without gradients."""
    if structure is Full:
        check_full(len(setting.center))
    index = layer_index(setting.layout, linear.layer, linear.bias).to(setting.center.device)
    network = setting.model
    with torch.no_grad():
        weight = setting.center[index]
        total: Tensor | None = None
        left = right = None
        rows = 0
        for x, y in batches(data, batch_size, setting.center.device):
            features = linear.features(network, x)
            outputs = features @ weight.T
            roots = setting.root(setting.likelihood, outputs, setting.likelihood.check(outputs, y))
            rows += len(x)
            if structure is Kronecker:
                flat = roots.transpose(1, 2).flatten(0, 1)
                g, a = (flat.T @ flat).double(), (features.T @ features).double()
                left, right = (g, a) if left is None or right is None else (left + g, right + a)
            elif structure is Diagonal:
                value = (roots.square().sum(2).T @ features.square()).double()
                total = value if total is None else total + value
            else:
                value = _outer(roots, features)
                total = value if total is None else total + value
    size = len(setting.center)
    if structure is Kronecker:
        assert left is not None
        assert right is not None
        layer = _Layer(network.get_submodule(linear.layer))
        layer.left, layer.right, layer.rows = left, right, rows
        return Kronecker(tuple(layer.factors(setting.layout, linear.layer, setting.prior)), left.new_zeros(size))
    assert total is not None
    if structure is Diagonal:
        return Diagonal(total.new_zeros(size).index_copy(0, index.flatten(), total.flatten()))
    flat_index = index.flatten()
    matrix = torch.zeros_like(total)
    matrix[flat_index[:, None], flat_index] = total
    return Full(matrix)


def _outer(roots: Tensor, features: Tensor) -> Tensor:
    """Σ_n (R_n R_nᵀ) ⊗ (φ_n φ_nᵀ), (C·D, C·D), class pair by class pair."""
    roots, features = roots.double(), features.double()  # float32 sums would swamp what data say little about
    hessians = roots @ roots.transpose(1, 2)  # (n, C, C)
    classes, width = hessians.shape[1], features.shape[1]
    total = torch.empty(classes, width, classes, width, dtype=torch.float64, device=features.device)
    for one in range(classes):
        for two in range(one, classes):
            block = (features * hessians[:, one, two, None]).T @ features
            total[one, :, two] = block
            total[two, :, one] = block  # symmetric in the features
    return total.reshape(classes * width, classes * width)
