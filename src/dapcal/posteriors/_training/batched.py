"""Many small networks of one architecture trained at once: a layer of all of them is one batched matrix product.

One after the other, almost all of the time of small networks goes into starting operations; side by side it goes into
arithmetic. Every network has data, initial weights and batches of its own, so what it learns is what it would learn
alone, up to rounding (with dropout: up to the masks).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dapcal.data import Labelled, batch_sizes, order_of
from dapcal.likelihoods import Likelihood
from dapcal.networks import Layout, dense_chain, layout_of


class Run(NamedTuple):
    """One of the networks: which data it learns, its initial weights, and the seed of its batches."""

    data: int
    model: nn.Module
    seed: int


class Learnt(NamedTuple):
    """M networks at their best epochs, or at the last one."""

    layout: Layout
    weights: Tensor  # (M, P)
    likelihoods: list[Likelihood]


def train(
    runs: Sequence[Run],
    likelihood: Likelihood,
    data: Sequence[Labelled],
    watched: Sequence[Labelled] | None,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    prior_scale: float = 1.0,
    patience: int | None = None,
    last: int | None = None,
    row_weights: Sequence[Tensor] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,  # noqa: ARG005
) -> Learnt:
    """Maximise the log joint of every network by Adam with a cosine schedule, as `dapcal.posteriors.map.fit` does.

    Args:
        runs: M networks, chains of linear layers and elementwise functions.
        likelihood: p(y | outputs); its free values are learnt too, one number each.
        data: J training sets of one size, with targets as the likelihood wants them.
        watched: J sets of one size, whose NLL says which epoch of a network is the best; None: the last one.
        epochs: passes over the data, at most.
        batch_size: of the minibatches of every network.
        learning_rate: at the start.
        prior_scale: σ0.
        patience: a network stops after this many epochs without a lower NLL; None: no network stops.
        last: epoch with which training ends, before the learning rate is zero.
        row_weights: of the rows of every training set, as `dapcal.posteriors.training.Training` has them.
        progress: told how many epochs of how many are done.
    """
    x, y = _stacked(data, "data")
    own_data = torch.tensor([run.data for run in runs])
    chain = dense_chain(runs[0].model, x[0])
    if chain is None:
        raise ValueError("Expected a chain of linear layers and elementwise functions; train other networks alone")
    layout = layout_of(dict(runs[0].model.named_parameters()))
    weights = torch.stack([layout.flatten(dict(run.model.named_parameters())).detach() for run in runs])
    given = {name: value.to(weights).expand(len(runs), 1).clone() for name, value in likelihood.free().items()}
    parameters = [weights.requires_grad_(), *(value.requires_grad_() for value in given.values())]
    training = [(name, module.train()) for name, module in chain]
    evaluation = dense_chain(_evaluated(runs[0].model), x[0])
    assert evaluation is not None

    def nll(layers: list[tuple[str, nn.Module]], inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean over rows (M, B, ...), (M,)."""
        own = likelihood.at({name: value[..., None] for name, value in given.items()})  # (M, 1, 1): of every output
        located = outputs(layers, layout, weights, inputs)
        return -own.log_likelihood(located, targets).mean(1)

    count, steps = x.shape[1], epochs * len(batch_sizes(x.shape[1], batch_size))
    optimizer = Adam(parameters, torch.full((len(runs),), learning_rate).to(weights))
    generators = [_batches_of(run.seed) for run in runs]
    first = own_data[:, None] * count
    weights_of = [None if row_weights is None else row_weights[run.data] for run in runs]
    rows_x, rows_y = x.flatten(0, 1), y.flatten(0, 1)
    seen = None if watched is None else [part[own_data.to(x.device)] for part in _stacked(watched, "watched")]
    best = Best(parameters)
    with torch.random.fork_rng(devices=[]):  # of dropout
        torch.random.default_generator.manual_seed(runs[0].seed)
        for epoch in range(epochs if last is None else last):
            drawn = [order_of(count, *pair) for pair in zip(generators, weights_of, strict=True)]
            order = first + torch.stack(drawn)
            for index in order.to(x.device).split(batch_sizes(count, batch_size), 1):
                penalty = 0.5 * (weights / prior_scale).square().sum(1) / count
                total = (penalty + nll(training, rows_x[index], rows_y[index])).sum()  # none feels another's loss
                share = 0.5 * (1 + math.cos(math.pi * optimizer.steps / steps))
                optimizer.step(torch.autograd.grad(total, parameters), share)
            if seen is not None:
                best.compare(_finite(nll(evaluation, *seen).detach(), epoch), epoch, patience)
            progress(epoch + 1, epochs)
            if best.ended:
                break
    if seen is None:
        best.values = [parameter.detach() for parameter in parameters]
    found_weights, *found_free = best.values
    free = [dict(zip(given, (value[m, 0] for value in found_free), strict=True)) for m in range(len(runs))]
    return Learnt(layout, found_weights, [likelihood.at(own) for own in free])


def _finite(nll: Tensor, epoch: int) -> Tensor:
    if not nll.isfinite().all():
        raise ValueError(
            f"The held-out NLL became {float(nll[~nll.isfinite()][0])} in epoch {epoch + 1}; lower `learning_rate` or "
            "scale the inputs and targets"
        )
    return nll


def outputs(chain: list[tuple[str, nn.Module]], layout: Layout, weights: Tensor, x: Tensor) -> Tensor:
    """Outputs (M, B, C) of M weight vectors (M, P), each at inputs of its own (M, B, D)."""
    h, parts = x, layout.unflatten(weights)
    for name, module in chain:
        if not isinstance(module, nn.Linear):
            h = module(h)
            continue
        weight, bias = parts[f"{name}.weight"], parts.get(f"{name}.bias")
        h = h @ weight.mT if bias is None else torch.baddbmm(bias[:, None], h, weight.mT)
    return h


class Adam:
    """Adam (Kingma and Ba 2014, arXiv:1412.6980) with a learning rate for each leading index of the parameters.

    Args:
        parameters: leaf tensors (M, ...), changed in place.
        rates: (M,).
    """

    def __init__(self, parameters: list[Tensor], rates: Tensor) -> None:
        self.parameters = parameters
        self.rates = rates[:, None]
        self.first = [torch.zeros_like(parameter) for parameter in parameters]
        self.second = [torch.zeros_like(parameter) for parameter in parameters]
        self.steps = 0

    @torch.no_grad()
    def step(
        self,
        gradients: Sequence[Tensor],
        share: float = 1.0,
        decay: tuple[float, float] = (0.9, 0.999),
        floor: float = 1e-8,
    ) -> None:
        """One step along the gradients, at a share of the learning rates."""
        self.steps += 1
        unbias, widen = 1 - decay[0] ** self.steps, math.sqrt(1 - decay[1] ** self.steps)
        state = zip(self.parameters, gradients, self.first, self.second, strict=True)
        for parameter, gradient, first, second in state:
            first.lerp_(gradient, 1 - decay[0])
            second.mul_(decay[1]).addcmul_(gradient, gradient, value=1 - decay[1])
            size = second.sqrt().div_(widen).add_(floor).div_(self.rates / unbias)
            parameter.addcdiv_(first, size, value=-share)


class Best:
    """The parameters of every network at its own best epoch."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self.values = [parameter.detach().clone() for parameter in parameters]
        self.nll = torch.full((len(parameters[0]),), math.inf).to(parameters[0])
        self.epoch = torch.zeros(len(parameters[0]), dtype=torch.long, device=parameters[0].device)
        self.running = torch.ones_like(self.epoch, dtype=torch.bool)

    @property
    def ended(self) -> bool:
        """Whether no network has patience left."""
        return not self.running.any()

    def compare(self, nll: Tensor, epoch: int, patience: int | None) -> None:
        """Take over what is better than before, of networks that still run."""
        better = self.running & (nll < self.nll)
        self.nll = torch.where(better, nll, self.nll)
        self.epoch = torch.where(better, epoch, self.epoch)
        for value, parameter in zip(self.values, self.parameters, strict=True):
            value[better] = parameter.detach()[better]
        if patience is not None:
            self.running &= epoch - self.epoch < patience


def _stacked(parts: Sequence[Labelled], name: str) -> tuple[Tensor, Tensor]:
    """Inputs (J, N, D) and targets (J, N, ...)."""
    sizes = {len(part.x) for part in parts}
    if len(sizes) != 1:
        raise ValueError(f"Expected `{name}` as sets of one size, got {sorted(sizes)} rows; leave out surplus rows")
    return torch.stack([part.x for part in parts]), torch.stack([part.y for part in parts])


def _evaluated(model: nn.Module) -> nn.Module:
    """The same layers with dropout off; weights come from outside."""
    return copy.deepcopy(model).eval()


def _batches_of(seed: int) -> torch.Generator:
    """The generator of batches as a network that is trained alone has it: the first number goes to dropout there."""
    generator = torch.Generator().manual_seed(seed)
    torch.randint(2**31, (1,), generator=generator)
    return generator
