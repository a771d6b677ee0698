"""The base posterior as an ensemble, and what all adjustments check."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dapcal.data import Labelled
from dapcal.likelihoods import Likelihood
from dapcal.types import Ensemble, Posterior


def base_ensemble(likelihood: Likelihood, outputs: Tensor) -> Ensemble:
    """Draws of equal weight 1/S and no analytic spread."""
    draws, n, _ = outputs.shape
    return Ensemble(
        outputs=outputs,
        conditional=likelihood.conditional(outputs),
        log_weights=torch.full((draws, n), -math.log(draws), dtype=torch.float64, device=outputs.device),
        spread=torch.zeros((n, 1), dtype=torch.float64, device=outputs.device),
    )


def base_on(posterior: Posterior, data: Labelled) -> Ensemble:
    """The base posterior at labelled inputs, by a forward pass only where it is not known already."""
    return base_ensemble(posterior.likelihood, posterior.outputs(data.x)) if data.base is None else data.base


def outputs_with_spread(posterior: Posterior, x: Tensor) -> Tensor:
    """Outputs of a posterior that has more than one draw."""
    outputs = posterior.outputs(x)
    if len(outputs) < 2:
        raise ValueError(
            "This posterior is a single network (MAP): it has no spread that a distance could widen. Fit a posterior "
            "to it, e.g. dapcal.posteriors.variational.fit(model, likelihood, train), or bring several networks with "
            "dapcal.posteriors.samples.from_state_dicts"
        )
    return outputs
