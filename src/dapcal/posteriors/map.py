"""MAP: one network, trained by the log joint. A point: it has no spread that a distance could widen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

import torch
from torch import nn

from dapcal.data import Data, in_memory
from dapcal.likelihoods import Likelihood
from dapcal.networks import any_inputs, frozen_copy, layout_of, split_state
from dapcal.posteriors._training import checkpoints
from dapcal.posteriors._training.log_joint import log_joint
from dapcal.posteriors._training.trainer import minimise
from dapcal.posteriors.network import NetworkPosterior
from dapcal.posteriors.training import Options, Training
from dapcal.prior import Aware, make_prior


@any_inputs
def fit(
    model: nn.Module,
    likelihood: Likelihood,
    train: Data,
    *,
    prior_scale: float | Mapping[str, float] = 1.0,
    seed: int = 0,
    aware: Aware = "*",
    **options: Unpack[Options],
) -> NetworkPosterior:
    """Maximise log p(y | θ, x) + log N(θ | 0, σ0² I), from the model's present weights.

    `posterior.network` is the trained module; the model passed in is left as it was.

    Args:
        model: any module from inputs to outputs (N, C).
        likelihood: p(y | outputs); its free values (noise level) are learnt too.
        train: (inputs, targets), a Dataset or a DataLoader.
        prior_scale: σ0, one or by name pattern.
        seed: of the order of the batches, and of dropout.
        aware: parameters that a distance may widen, see `dapcal.prior.make_prior`.
        options: epochs, learning rate and all else of `dapcal.posteriors.training.Training`.
    """
    training = Training(**options)
    data = in_memory(train, "train")
    objective = log_joint(model, likelihood, data, prior_scale, aware, training)
    minimise(
        objective.loss,
        [*objective.parameters, *objective.free.values()],
        objective.tensors,
        objective.data,
        training=training,
        generator=torch.Generator().manual_seed(seed),
        method="MAP",
        settings={
            "model": checkpoints.of_model(model, start=False), "prior_scale": prior_scale, "likelihood": likelihood,
        },
        held_out_nll=objective.held_out_nll,
    )  # fmt: skip
    return point(objective.module, objective.likelihood, prior_scale=prior_scale, aware=aware)


def point(
    model: nn.Module,
    likelihood: Likelihood,
    *,
    prior_scale: float | Mapping[str, float] = 1.0,
    aware: Aware = "*",
) -> NetworkPosterior:
    """A trained network as a posterior of one draw."""
    random, shared = split_state(model)
    layout = layout_of(random)
    center = layout.flatten(random)
    prior = make_prior(layout.sizes, prior_scale, aware, center.device)
    return NetworkPosterior(frozen_copy(model), likelihood, layout, center[None], center, shared, prior=prior)
