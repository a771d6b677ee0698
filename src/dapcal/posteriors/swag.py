"""SWAG: a Gaussian from the iterates of SGD that wanders around the MAP."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

from dapcal.data import Data, Labelled, batch_count, in_memory, shuffled, size
from dapcal.gaussians.low_rank import LowRankGaussian
from dapcal.likelihoods import Likelihood
from dapcal.networks import Layout, any_inputs, frozen_copy, split_state
from dapcal.posteriors._training import checkpoints
from dapcal.posteriors._training.log_joint import log_joint
from dapcal.posteriors._training.trainer import minimise
from dapcal.posteriors._training.trivial import beside_trivial, some_rows
from dapcal.posteriors.network import NetworkPosterior
from dapcal.posteriors.training import Options, Training, constant
from dapcal.prior import Aware

TRAINED = 0.5  # times the error of an answer without inputs, under which a network was trained


def momentum(parameters: list[Tensor], learning_rate: float) -> Optimizer:
    """The default optimiser: SGD with momentum 0.9."""
    return SGD(parameters, learning_rate, momentum=0.9)


@any_inputs
def fit(
    model: nn.Module,
    likelihood: Likelihood,
    train: Data,
    *,
    prior_scale: float | Mapping[str, float] = 1.0,
    rank: int = 20,
    start: float = 0.5,
    per_epoch: int = 1,
    draws: int = 50,
    seed: int = 0,
    aware: Aware = "*",
    **options: Unpack[Options],
) -> NetworkPosterior:
    """N(θ̄, ½ (diag(v) + D Dᵀ / (K − 1))), where θ̄ and v are mean and variance of iterates of SGD on the log joint.

    D holds the last K iterates' deviations from the mean of their time. Pass a trained model
    (`dapcal.posteriors.map.fit(...).network`); from there SGD wanders, by default with momentum 0.9 and a constant
    learning rate of 0.01. A larger one gives a wider posterior. Maddox et al. (2019), arXiv:1902.02476.

    Batch-norm statistics belong to the weights, so after training those of every draw, and of the mean, are computed
    anew from the training inputs (dropout off): one more pass over them for each draw. Transport moves the weights of
    such a network but keeps each draw's statistics; Inflate has no such gap. The likelihood's free values (noise level)
    are learnt too and averaged over the iterates. The held-out NLL is that of the present iterate. Iterates whose mean
    is no longer any good, where the model that was given is, are refused: the learning rate is too large.

    Args:
        model: the trained network.
        likelihood: p(y | outputs).
        train: (inputs, targets), a Dataset or a DataLoader.
        prior_scale: σ0, one or by name pattern.
        rank: K, at most; fewer where fewer iterates are collected. Memory is K times that of the network.
        start: share of the epochs that pass before iterates are collected.
        per_epoch: iterates collected in each epoch from then on, evenly spread; the last is at its end.
        draws: S, fixed draws that predictions use.
        seed: of batches, dropout and draws.
        aware: parameters that a distance may widen, see `dapcal.prior.make_prior`.
        options: epochs, learning rate and all else of `dapcal.posteriors.training.Training`, but `patience`.
    """
    if rank < 2 or draws < 1 or per_epoch < 1 or not 0 <= start < 1:
        raise ValueError(
            "Expected `rank` >= 2, `draws` and `per_epoch` >= 1, `start` at least 0 and under 1, got "
            f"{rank}, {draws}, {per_epoch}, {start}"
        )
    if options.get("patience") is not None:
        raise ValueError("SWAG averages iterates and has no best one to go back to; leave out `patience`")
    defaults: Options = {"optimizer": momentum, "schedule": constant, "learning_rate": 0.01}
    settings: Options = {**defaults, **options}
    training = Training(**settings)
    data = in_memory(train, "train")
    chosen = _steps(training.epochs, batch_count(data, training.batch_size), start, per_epoch)
    objective = log_joint(model, likelihood, data, prior_scale, aware, training)
    moments = _no_moments(objective.vector, min(rank, len(chosen)))
    free = {n: torch.zeros_like(t) for n, t in objective.free.items()}
    step = torch.zeros((), dtype=torch.long)

    def collect() -> None:
        if int(step) in chosen:
            moments.add(objective.vector)
            for name, average in free.items():
                average += (objective.free[name].detach() - average) / int(moments.count)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        collect()  # the last step's iterate: here, so that no optimiser has to be watched
        step.add_(1)
        return objective.loss(x, y)

    generator = torch.Generator().manual_seed(seed)
    minimise(
        loss,
        [*objective.parameters, *objective.free.values()],
        {**objective.tensors, **moments.tensors, **{f"mean of {n}": t for n, t in free.items()}, "steps taken": step},
        objective.data,
        training=training,
        generator=generator,
        method="SWAG",
        settings={
            "model": checkpoints.of_model(model), "prior_scale": prior_scale, "likelihood": likelihood, "rank": rank,
            "start": start, "per_epoch": per_epoch,
        },
        held_out_nll=objective.held_out_nll,
    )  # fmt: skip
    collect()
    gaussian = moments.gaussian()
    drawn, (_, shared) = gaussian.sample(draws, generator), split_state(objective.module)
    found = statistics(
        objective.module, objective.layout, torch.cat([gaussian.mean[None], drawn]), shared, data, training, generator
    )
    posterior = NetworkPosterior(
        model=frozen_copy(objective.module),
        likelihood=likelihood.at(free),
        layout=objective.layout,
        draws=drawn,
        center=gaussian.mean,
        shared={**shared, **{n: t[0].clone() for n, t in found.items()}},
        buffers={n: t[1:] for n, t in found.items()},
        gaussian=gaussian,
        prior=objective.prior,
    )
    _refuse_if_destroyed(posterior.network, frozen_copy(model), posterior.likelihood, data)
    return posterior


def _refuse_if_destroyed(
    mean: nn.Module, given: nn.Module, likelihood: Likelihood, data: Labelled | DataLoader
) -> None:
    """A network that was good, and iterates whose mean is not: steps were too long, though all numbers are finite."""
    rows = some_rows(data)
    before = beside_trivial(given, likelihood, rows)
    if before is None or before > TRAINED:
        return
    after = beside_trivial(mean, likelihood, rows)
    if after is None or not after <= max(2 * before, (1 + before) / 2):
        raise ValueError(
            f"The mean of the iterates has {after:.3g} times the error of an answer without inputs, and the network "
            f"that was given {before:.3g} times; lower `learning_rate` or scale the inputs and targets"
        )


@dataclass(frozen=True, eq=False)
class Moments:
    """Running moments of iterates, in place, so that a checkpoint holds them."""

    count: Tensor  # ()
    mean: Tensor  # (P,)
    squares: Tensor  # (P,) Σ (θ − mean)², by Welford's recursion: second moments would cancel in float32
    deviations: Tensor  # (K, P) θ − mean of the last K iterates, each with the mean of its time

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of them, by names that no parameter has."""
        return {f"iterates' {name}": tensor for name, tensor in vars(self).items()}

    def add(self, vector: Tensor) -> None:
        """Count one more iterate (P,)."""
        before = vector - self.mean
        number = int(self.count.add_(1))
        self.mean.add_(before / number)
        after = vector - self.mean
        self.squares.add_(before * after)
        self.deviations[(number - 1) % len(self.deviations)] = after

    def gaussian(self) -> LowRankGaussian:
        """N(mean, ½ (diag(variance) + D Dᵀ / (K − 1)))."""
        k = len(self.deviations)
        variance = self.squares.clamp_min(0) / (2 * int(self.count))
        return LowRankGaussian(self.mean, variance, self.deviations.T.contiguous() / math.sqrt(2 * (k - 1)))


def _no_moments(like: Tensor, rank: int) -> Moments:
    zeros = torch.zeros_like(like)
    return Moments(torch.zeros((), dtype=torch.long), zeros, zeros.clone(), zeros.repeat(rank, 1))


def _steps(epochs: int, batches: int, start: float, per_epoch: int) -> set[int]:
    """Numbers, from 1, of the steps after which an iterate is collected.

    >>> sorted(_steps(epochs=4, batches=10, start=0.5, per_epoch=2))
    [25, 30, 35, 40]
    """
    if per_epoch > batches:
        raise ValueError(
            f"Expected `per_epoch` of at most the {batches} minibatches of an epoch, got {per_epoch}; lower it or "
            "`batch_size`"
        )
    ends = [-(-part * batches // per_epoch) for part in range(1, per_epoch + 1)]
    first = round(start * epochs)
    steps = {epoch * batches + end for epoch in range(first, epochs) for end in ends}
    if len(steps) < 2:
        raise ValueError(
            f"Expected at least 2 iterates, got {len(steps)} from epoch {first + 1} of {epochs} on; raise `epochs` or "
            "`per_epoch`, or lower `start`"
        )
    return steps


def statistics(
    module: nn.Module,
    layout: Layout,
    vectors: Tensor,
    shared: Mapping[str, Tensor],
    data: Labelled | DataLoader,
    training: Training,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Batch-norm statistics of the training inputs under each of S vectors of parameters, (S, ...) by name.

    Every layer's mean and variance are averages over minibatches, weighted by their sizes, of one pass in random order.

    Args:
        module: the network.
        layout: of the vectors.
        vectors: parameters (S, P).
        shared: parameters and buffers that the vectors do not hold.
        data: training data.
        training: for batch size and precision.
        generator: of the order of the inputs, and of what a DataLoader draws.
    """
    module = copy.deepcopy(module).eval()
    layers = {n: m for n, m in module.named_modules() if isinstance(m, nn.modules.batchnorm._NormBase)}
    layers = {n: m for n, m in layers.items() if m.running_mean is not None}
    names = [f"{layer}.{part}" for layer in layers for part in ("running_mean", "running_var")]
    found = {n: torch.zeros(len(vectors), *shared[n].shape).to(shared[n]) for n in names}
    if not layers:
        return found
    for layer in layers.values():
        layer.train()
    own = {n: t.clone() for n, t in shared.items()}  # layers count minibatches in place
    seen = 0
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        order = torch.randperm(size(data), generator=generator)
        torch.random.default_generator.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
        batches: Iterable = data if isinstance(data, DataLoader) else shuffled(data, order, training.batch_size)
        for x, _ in batches:
            seen += len(x)
            for layer in layers.values():
                layer.momentum = len(x) / seen
            for row, vector in enumerate(vectors):
                state = {**own, **layout.unflatten(vector), **{n: t[row] for n, t in found.items()}}
                with training.autocast(vectors.device):
                    functional_call(module, state, (x.to(vectors.device),))
    return found
