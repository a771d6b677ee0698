"""Many small networks of one architecture trained at once: a layer of all of them is one batched matrix product.

The splits, learning rates and ensemble members of a small data set differ in data, rate and seed alone. One after the
other, almost all of the time goes into starting operations; side by side it goes into arithmetic. Every network has a
generator of its own, so what it learns does not depend on its neighbours, and each row of its data is seen once an
epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dapcal.data import batch_sizes
from dapcal.likelihoods.normal import log_normal
from dapcal.networks import Layout, layout_of
from dapcal.posteriors._training.batched import Adam


class Network(NamedTuple):
    """One of the networks: which data it learns, how fast, and the seed of its weights, batches and noise."""

    data: int
    learning_rate: float
    seed: int


class Trained(NamedTuple):
    """M networks after some epochs; a mean-field posterior has scales, a MAP estimate has none."""

    mean: Tensor  # (M, P)
    log_noise: Tensor  # (M,)
    log_scale: Tensor | None = None  # (M, P)


def fit_map(
    x: Tensor,
    y: Tensor,
    networks: Sequence[Network],
    *,
    hidden: Sequence[int] = (50, 50),
    epochs: Sequence[int] = (200,),
    batch_size: int = 64,
    prior_scale: float = 1.0,
) -> dict[int, Trained]:
    """Maximise Σ_n log N(y_n | f(x_n), noise²) + log N(θ | 0, σ0² I) for every network, from torch's initial weights.

    Args:
        x: inputs of J data sets of one size, (J, N, D).
        y: their targets, (J, N).
        networks: M networks, in any mixture of data, rates and seeds.
        hidden: widths of the hidden layers (ReLU).
        epochs: when to take a snapshot; training ends with the last.
        batch_size: of the minibatches of every network.
        prior_scale: σ0.

    Returns:
        The networks at each of the epochs.
    """
    mean = initial_weights(x.shape[-1], hidden, networks).to(x)
    layout, count = layout_for(x.shape[-1], hidden), x.shape[1]

    def loss(parameters: list[Tensor], batch: Tensor, targets: Tensor, _: Sequence[torch.Generator]) -> Tensor:
        weights, log_noise = parameters
        penalty = 0.5 * (weights / prior_scale).square().sum(1) / count
        return penalty - _mean_log_likelihood(layout, weights, log_noise, batch, targets)

    log_noise = torch.zeros(len(networks), 1).to(x)
    snapshots = _descend(loss, [mean, log_noise], x, y, networks, epochs, batch_size)
    return {epoch: Trained(mean, noise[:, 0]) for epoch, (mean, noise) in snapshots.items()}


def fit_variational(
    x: Tensor,
    y: Tensor,
    networks: Sequence[Network],
    *,
    hidden: Sequence[int] = (50, 50),
    epochs: Sequence[int] = (200,),
    batch_size: int = 64,
    prior_scale: float = 1.0,
    initial_scale: float = 0.02,
    start: Trained | None = None,
) -> dict[int, Trained]:
    """Maximise the ELBO of N(mean, diag scale²) with prior N(0, σ0² I) for every network; one draw for each gradient.

    Args:
        x: inputs of J data sets of one size, (J, N, D).
        y: their targets, (J, N).
        networks: M networks, in any mixture of data, rates and seeds.
        hidden: widths of the hidden layers (ReLU).
        epochs: when to take a snapshot; training ends with the last.
        batch_size: of the minibatches of every network.
        prior_scale: σ0.
        initial_scale: scale at the start.
        start: M networks that the means and noise levels start from; by default torch's initial weights and 1.

    Returns:
        The posteriors at each of the epochs.
    """
    mean = initial_weights(x.shape[-1], hidden, networks).to(x) if start is None else start.mean.clone()
    log_noise = torch.zeros(len(networks), 1).to(x) if start is None else start.log_noise[:, None].clone()
    log_scale = torch.full_like(mean, math.log(initial_scale))
    layout, count = layout_for(x.shape[-1], hidden), x.shape[1]

    def loss(parameters: list[Tensor], batch: Tensor, targets: Tensor, own: Sequence[torch.Generator]) -> Tensor:
        mean, log_scale, log_noise = parameters
        noise = torch.stack([torch.randn(mean.shape[1], generator=generator) for generator in own]).to(mean)
        scale = log_scale.exp()
        ratio = scale / prior_scale
        kl = (0.5 * (ratio.square() + (mean / prior_scale).square() - 1) - log_scale + math.log(prior_scale)).sum(1)
        return kl / count - _mean_log_likelihood(layout, mean + scale * noise, log_noise, batch, targets)

    snapshots = _descend(loss, [mean, log_scale, log_noise], x, y, networks, epochs, batch_size)
    return {epoch: Trained(mean, noise[:, 0], scale) for epoch, (mean, scale, noise) in snapshots.items()}


def mlp(inputs: int, hidden: Sequence[int] = (50, 50)) -> nn.Sequential:
    """The architecture as a module: ReLU layers and one output."""
    widths = [inputs, *hidden]
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))


def layout_for(inputs: int, hidden: Sequence[int] = (50, 50)) -> Layout:
    """Names and shapes of the architecture's parameters."""
    with torch.device("meta"):  # draws no initial weights
        return layout_of(dict(mlp(inputs, hidden).named_parameters()))


def initial_weights(inputs: int, hidden: Sequence[int], networks: Sequence[Network]) -> Tensor:
    """torch's initial weights under each network's seed, (M, P)."""
    vectors = []
    with torch.random.fork_rng(devices=[]):
        for network in networks:
            torch.manual_seed(network.seed)
            vectors.append(nn.utils.parameters_to_vector(mlp(inputs, hidden).parameters()).detach())
    return torch.stack(vectors)


def outputs(layout: Layout, weights: Tensor, x: Tensor) -> Tensor:
    """Outputs (M, N) of M weight vectors (M, P), each at inputs of its own (M, N, D)."""
    h = x
    parts = list(layout.unflatten(weights).values())
    for place, (weight, bias) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        h = torch.baddbmm(bias[:, None], h if place == 0 else h.relu(), weight.mT)
    return h[..., 0]


def _mean_log_likelihood(layout: Layout, weights: Tensor, log_noise: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Mean over the minibatch, (M,)."""
    return log_normal(y, outputs(layout, weights, x), (2 * log_noise).exp()).mean(1)


Loss = Callable[[list[Tensor], Tensor, Tensor, Sequence[torch.Generator]], Tensor]
"""From parameters (M, ...), inputs (M, B, D), targets (M, B) and the networks' generators to losses (M,)."""


def _descend(
    loss: Loss,
    parameters: list[Tensor],
    x: Tensor,
    y: Tensor,
    networks: Sequence[Network],
    epochs: Sequence[int],
    batch_size: int,
) -> dict[int, list[Tensor]]:
    """Adam on all networks at once, and copies of the parameters at the given epochs."""
    sets, count = y.shape
    odd = [network.data for network in networks if not 0 <= network.data < sets]
    if odd or not networks or not epochs:
        raise ValueError(
            f"Expected networks of data sets 0 to {sets - 1} and at least one epoch, got data {odd[:4]}, "
            f"{len(networks)} networks and epochs {tuple(epochs)}"
        )
    rows_x, rows_y = x.flatten(0, 1), y.flatten()
    first = torch.tensor([network.data for network in networks])[:, None] * count  # of a network's own rows
    own = [torch.Generator().manual_seed(network.seed) for network in networks]
    parameters = [parameter.requires_grad_() for parameter in parameters]
    optimizer = Adam(parameters, torch.tensor([network.learning_rate for network in networks]).to(x))
    snapshots = {}
    for epoch in range(1, max(epochs) + 1):
        order = first + torch.stack([torch.randperm(count, generator=generator) for generator in own])
        for index in order.to(x.device).split(batch_sizes(count, batch_size), 1):
            total = loss(parameters, rows_x[index], rows_y[index], own).sum()  # no network feels another's loss
            optimizer.step(torch.autograd.grad(total, parameters))
        if epoch in epochs:
            snapshots[epoch] = [parameter.detach().clone() for parameter in parameters]
    return snapshots
