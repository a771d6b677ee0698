"""Stochastic-gradient MCMC in cycles: Langevin and Hamiltonian draws from minibatches.

The step size falls from its largest value to zero along a cosine and starts again, M times in K steps:

    η_k = η/2 (cos(π r_k) + 1),   r_k = (k M / K) mod 1,   k = 0, …, K − 1.

The first part of a cycle explores (gradient steps without noise, no draws), the rest samples. Zhang et al. (2020),
arXiv:1902.03932; Welling, Teh (2011); Chen, Fox, Guestrin (2014).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Unpack

import torch
from torch import Tensor, nn

from dapcal.data import Data, batch_count, in_memory
from dapcal.likelihoods import Likelihood
from dapcal.networks import any_inputs, frozen_copy, split_state
from dapcal.posteriors._training import checkpoints
from dapcal.posteriors._training.log_joint import log_joint
from dapcal.posteriors._training.trainer import run
from dapcal.posteriors.network import NetworkPosterior
from dapcal.posteriors.training import Options, Training
from dapcal.prior import Aware

_REFUSED = {
    "optimizer": "the sampler takes its own steps",
    "schedule": "the step size follows the cycles",
    "patience": "draws come from the whole run, which has no best epoch to go back to",
}


@any_inputs
def sgld(
    model: nn.Module,
    likelihood: Likelihood,
    train: Data,
    *,
    prior_scale: float | Mapping[str, float] = 1.0,
    cycles: int = 4,
    exploration: float = 0.5,
    temperature: float = 1.0,
    draws: int = 50,
    seed: int = 0,
    aware: Aware = "*",
    **options: Unpack[Options],
) -> NetworkPosterior:
    """Langevin dynamics: θ ← θ − η ∇Ū + √(2 η T / N) ξ, with Ū the mean loss, so that N Ū is the negative log joint.

    Draws have density ∝ exp(−N Ū / T), up to the noise of minibatches and a step that is not small: a direction of
    curvature λ (of Ū) gets 1/(1 − η λ / 2) times its variance. The learning rate η acts on the mean loss as in other
    trainers, so ordinary values will do; 0.01 where none is given.

    Each cycle gives `draws // cycles` draws, the last `draws % cycles` cycles one more, evenly spread over its sampling
    steps; the last is at its end. The network runs in evaluation mode: dropout is off, batch-norm statistics stay as
    they are, so pass a trained model. The likelihood is held as given: fit its noise level first
    (`dapcal.posteriors.map.fit(...).likelihood`). `posterior.network` is the draw with the lowest mean loss over the
    epoch before it. The held-out NLL is that of the present iterate. A checkpoint holds all draws so far: for large
    networks raise `checkpoint_seconds`.

    Args:
        model: the trained network.
        likelihood: p(y | outputs).
        train: (inputs, targets), a Dataset or a DataLoader.
        prior_scale: σ0, one or by name pattern.
        cycles: M, each of epochs / M epochs; several find several modes.
        exploration: share of each cycle that gives no draws.
        temperature: T; under 1 draws concentrate (a cold posterior).
        draws: S, from all cycles together.
        seed: of batches and noise.
        aware: parameters that a distance may widen, see `dapcal.prior.make_prior`.
        options: epochs, learning rate and all else of `dapcal.posteriors.training.Training`, but `optimizer`,
            `schedule` and `patience`.
    """
    plan = Cycles(cycles, exploration, temperature, draws, None)
    return _sample(model, likelihood, train, plan, prior_scale, seed, aware, options)


@any_inputs
def sghmc(
    model: nn.Module,
    likelihood: Likelihood,
    train: Data,
    *,
    prior_scale: float | Mapping[str, float] = 1.0,
    cycles: int = 4,
    exploration: float = 0.5,
    friction: float = 0.1,
    temperature: float = 1.0,
    draws: int = 50,
    seed: int = 0,
    aware: Aware = "*",
    **options: Unpack[Options],
) -> NetworkPosterior:
    """Hamiltonian dynamics with friction α: v ← (1 − α) v − η ∇Ū + √(2 α η T / N) ξ, θ ← θ + v.

    All else is as for `sgld`. Momentum carries it as far as steps 1/α times as long would, and yet a direction of
    curvature λ gets no more than 1/(1 − η λ / (4 − 2α)) times its variance. `friction` = 1 is `sgld`.

    Args:
        model: the trained network.
        likelihood: p(y | outputs).
        train: (inputs, targets), a Dataset or a DataLoader.
        prior_scale: σ0, one or by name pattern.
        cycles: M, each of epochs / M epochs; several find several modes.
        exploration: share of each cycle that gives no draws.
        friction: α, over 0 and at most 1.
        temperature: T; under 1 draws concentrate (a cold posterior).
        draws: S, from all cycles together.
        seed: of batches and noise.
        aware: parameters that a distance may widen, see `dapcal.prior.make_prior`.
        options: epochs, learning rate and all else of `dapcal.posteriors.training.Training`, but `optimizer`,
            `schedule` and `patience`.
    """
    if not 0 < friction <= 1:
        raise ValueError(f"Expected `friction` over 0 and at most 1, got {friction}; 0.1 is usual")
    plan = Cycles(cycles, exploration, temperature, draws, friction)
    return _sample(model, likelihood, train, plan, prior_scale, seed, aware, options)


@dataclass(frozen=True)
class Cycles:
    """What happens when."""

    cycles: int
    exploration: float
    temperature: float
    draws: int
    friction: float | None  # None for Langevin dynamics

    def __post_init__(self) -> None:
        if self.cycles < 1 or self.draws < self.cycles:
            raise ValueError(
                f"Expected `cycles` >= 1 and a draw from each of them at least, got {self.cycles} cycles and "
                f"{self.draws} draws"
            )
        if not 0 <= self.exploration < 1 or not 0 < self.temperature < math.inf:
            raise ValueError(
                "Expected `exploration` at least 0 and under 1, and `temperature` > 0, got "
                f"{self.exploration} and {self.temperature}"
            )

    def rate(self, step: int, steps: int) -> float:
        """η_k / η."""
        return 0.5 * (math.cos(math.pi * (step * self.cycles % steps) / steps) + 1)

    def stages(self, steps: int) -> list[range]:
        """The sampling steps of each cycle, counted from 0."""
        edge = [-(-m * steps // self.cycles) for m in range(self.cycles + 1)]
        explored = [round(self.exploration * (end - begin)) for begin, end in pairwise(edge)]
        return [range(edge[m] + explored[m], edge[m + 1]) for m in range(self.cycles)]

    def places(self, steps: int) -> dict[int, int]:
        """The steps after which draws are taken, with the number of the draw.

        >>> Cycles(cycles=2, exploration=0.5, temperature=1.0, draws=5, friction=None).places(steps=24)
        {8: 0, 11: 1, 19: 2, 21: 3, 23: 4}
        """
        found: list[int] = []
        for number, stage in enumerate(self.stages(steps)):
            count = self.draws // self.cycles + (number >= self.cycles - self.draws % self.cycles)
            if count > len(stage):
                raise ValueError(
                    f"Expected at least {count} sampling steps in cycle {number + 1} for its draws, got {len(stage)} "
                    f"of {steps} steps in all; raise `epochs`, or lower `draws`, `exploration` or `batch_size`"
                )
            found += [stage[-(-part * len(stage) // count) - 1] for part in range(1, count + 1)]
        return {step: draw for draw, step in enumerate(found)}


def _sample(
    model: nn.Module,
    likelihood: Likelihood,
    train: Data,
    plan: Cycles,
    prior_scale: float | Mapping[str, float],
    seed: int,
    aware: Aware,
    options: Options,
) -> NetworkPosterior:
    for name, reason in _REFUSED.items():
        if options.get(name) is not None:
            raise ValueError(f"SG-MCMC has no `{name}`: {reason}; leave it out")
    defaults: Options = {"learning_rate": 0.01}
    given: Options = {**defaults, **options}
    training = Training(**given)
    data = in_memory(train, "train")
    epoch = batch_count(data, training.batch_size)
    steps = training.epochs * epoch
    places, stages = plan.places(steps), plan.stages(steps)
    objective = log_joint(model, likelihood, data, prior_scale, aware, training)
    objective.module.eval()
    parameters, start = objective.parameters, objective.vector
    velocity = [torch.zeros_like(p) for p in parameters]
    found = start.new_zeros(plan.draws, len(start))
    losses = torch.full((epoch,), math.nan, dtype=torch.float64, device=start.device)  # of the last steps, in a ring
    levels = torch.full((plan.draws,), math.nan, dtype=torch.float64, device=start.device)
    counter = torch.zeros((), dtype=torch.long)
    keep, share = (0.0, 1.0) if plan.friction is None else (1 - plan.friction, plan.friction)

    def step(x: Tensor, y: Tensor) -> Tensor:
        k = int(counter)
        rate = training.learning_rate * plan.rate(k, steps)
        sampling = k in stages[k * plan.cycles // steps]
        noise = math.sqrt(2 * share * rate * plan.temperature / objective.count) if sampling else 0.0
        loss = objective.loss(x, y)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for theta, v, gradient in zip(parameters, velocity, gradients, strict=True):
                v.mul_(keep).sub_(gradient, alpha=rate)
                if sampling:
                    v.add_(torch.randn_like(v), alpha=noise)
                theta.add_(v)
        losses[k % epoch] = loss.detach()
        if k in places:
            found[places[k]], levels[places[k]] = objective.vector, losses.nanmean()
        counter.add_(1)
        return loss.detach()

    run(
        step,
        {
            **objective.tensors, **{f"velocity {n}": v for n, v in zip(objective.layout.names, velocity, strict=True)},
            "draws taken": found, "losses of steps": losses, "losses of draws": levels, "steps taken": counter,
        },
        {},
        objective.data,
        training=training,
        generator=torch.Generator().manual_seed(seed),
        method="SGLD" if plan.friction is None else "SGHMC",
        settings={
            "model": checkpoints.of_model(model), "prior_scale": prior_scale, "likelihood": likelihood, "plan": plan,
        },
        held_out_nll=objective.held_out_nll,
    )  # fmt: skip
    return NetworkPosterior(
        model=frozen_copy(objective.module),
        likelihood=likelihood,
        layout=objective.layout,
        draws=found,
        center=found[levels.argmin()],
        shared=split_state(objective.module)[1],
        prior=objective.prior,
    )
