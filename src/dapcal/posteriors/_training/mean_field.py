"""What both ways to a mean-field posterior share: its divergence from the prior, held-out NLL, and collapse."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from dapcal.gaussians import DiagonalGaussian
from dapcal.likelihoods import Likelihood
from dapcal.prior import Prior
from dapcal.records import DapcalWarning

HELD_OUT_DRAWS = 10  # that the held-out NLL is read from during training
COLLAPSED = 0.95  # share of parameters at the prior from which on a warning comes


def fixed_draws(like: Tensor, seed: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Draws (HELD_OUT_DRAWS, P) from mean and scale, with the same noise in every epoch: its NLL falls smoothly."""
    generator = torch.Generator().manual_seed(seed + 1)  # not the noise of training
    noise = torch.randn(HELD_OUT_DRAWS, len(like), generator=generator, dtype=like.dtype).to(like.device)
    return lambda mean, scale: mean + scale * noise


def mixture_nll(outputs: Tensor, y: Tensor, likelihood: Likelihood) -> Tensor:
    """−log mean_s p(y | outputs_s) for outputs (S, N, C), averaged over inputs."""
    log_p = likelihood.log_likelihood(outputs, likelihood.check(outputs, y.to(outputs.device)))
    return -(torch.logsumexp(log_p, 0) - math.log(len(log_p))).mean()


def warn_if_collapsed(gaussian: DiagonalGaussian, prior: Prior) -> None:
    """A warning where almost all parameters are distributed as their prior says: data taught the network nothing."""
    sigma0 = prior.sigma0[prior.group]
    log_scale = 0.5 * gaussian.variance.double().log()
    at_prior = divergences(gaussian.mean.double(), log_scale, sigma0) < 0.01
    share = float(at_prior.double().mean())
    if share > COLLAPSED:
        warnings.warn(
            f"The posterior collapsed onto the prior: {share:.0%} of the parameters are less than 0.01 nats away from "
            "it. Use a smaller `kl_weight` (0.1 or 0.01), a `warm_up`, or more data",
            DapcalWarning,
            stacklevel=3,
        )


def divergence(mean: Tensor, log_scale: Tensor, sigma0: float | Tensor) -> Tensor:
    """KL(N(mean, exp(2 log_scale)) ‖ N(0, σ0²)), summed.

    >>> divergence(torch.tensor([0.0]), torch.tensor([0.0]), 1.0).item()
    0.0
    """
    return divergences(mean, log_scale, sigma0).sum()


def divergences(mean: Tensor, log_scale: Tensor, sigma0: float | Tensor) -> Tensor:
    """The same for each parameter."""
    ratio = 2 * (log_scale - torch.as_tensor(sigma0, dtype=mean.dtype, device=mean.device).log())
    return 0.5 * (ratio.exp() + (mean / sigma0) ** 2 - 1 - ratio)
