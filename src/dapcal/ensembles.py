"""A posterior seen at inputs: equal draws, or closed-form moments as one draw with an analytic spread."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

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


def closed_ensemble(likelihood: Likelihood, moments: OutputMoments) -> Ensemble:
    """Moments as one draw at the mean with an analytic spread."""
    base = base_ensemble(likelihood, moments.mean[None])
    return base._replace(spread=likelihood.closed_spread(moments.variance, moments.mean.shape[-1]))


def seen(posterior: Posterior, x: Tensor, drawn: bool = False) -> Ensemble:
    """The base posterior at inputs x: by closed-form moments where it has them, else (or if `drawn`) by its draws."""
    return read_by(posterior, x, drawn)(posterior.likelihood)


def read_by(posterior: Posterior, x: Tensor, drawn: bool = False) -> Callable[[Likelihood], Ensemble]:
    """The same for any likelihood, after one pass over the inputs."""
    moments = None if drawn else posterior.moments(x)
    if moments is not None:
        return lambda likelihood: closed_ensemble(likelihood, moments)
    outputs = posterior.outputs(x)
    return lambda likelihood: base_ensemble(likelihood, outputs)


def with_variance(posterior: Posterior, x: Tensor, drawn: bool = False) -> tuple[Ensemble, Tensor]:
    """The base posterior as `seen`, which must have more than one draw or moments, and V of its locations, (N, K)."""
    likelihood = posterior.likelihood
    moments = None if drawn else posterior.moments(x)
    if moments is not None:
        base = closed_ensemble(likelihood, moments)
        return base, base.spread
    outputs = outputs_with_spread(posterior, x)
    return base_ensemble(likelihood, outputs), likelihood.location_variance(outputs)


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


class Evaluated(NamedTuple):
    """Labelled inputs, and what the base posterior says of them."""

    x: Tensor  # (N, ...)
    y: Tensor  # (N,) or (N, K)
    base: Ensemble

    def subset(self, index: Tensor) -> Labelled:
        """The rows at `index`, without `base`."""
        return Labelled(self.x[index], self.y[index])


def evaluated(posterior: Posterior, data: Labelled, drawn: bool = False) -> Evaluated:
    """Labelled inputs seen by a posterior."""
    return Evaluated(data.x, data.y, seen(posterior, data.x, drawn))
