"""A posterior seen at inputs: equal draws, or closed-form moments as one draw with an analytic spread."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dapcal.data import Labelled
from dapcal.likelihoods import Likelihood
from dapcal.moments import OutputMoments
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


def moments_of(posterior: Posterior, x: Tensor, moving: bool = False) -> OutputMoments | None:
    """Closed-form moments of the outputs, where the posterior has them (linearised networks, last layers)."""
    if getattr(posterior, "linear", None) is None:
        return None
    moments: OutputMoments = posterior.moments(x, moving)  # type: ignore[attr-defined]
    return moments


def closed_ensemble(likelihood: Likelihood, moments: OutputMoments) -> Ensemble:
    """Moments as one draw at the mean with an analytic spread."""
    base = base_ensemble(likelihood, moments.mean[None])
    return base._replace(spread=likelihood.closed_spread(moments.variance, moments.mean.shape[-1]))


def base_of(posterior: Posterior, x: Tensor, closed: bool) -> Ensemble:
    """The base posterior at inputs x, by closed-form moments or by draws."""
    moments = moments_of(posterior, x) if closed else None
    if moments is None:
        return base_ensemble(posterior.likelihood, posterior.outputs(x))
    return closed_ensemble(posterior.likelihood, moments)


def base_on(posterior: Posterior, data: Labelled) -> Ensemble:
    """The base posterior at labelled inputs, by a forward pass only where it is not known already."""
    return base_ensemble(posterior.likelihood, posterior.outputs(data.x)) if data.base is None else data.base
