"""A Gaussian posterior given by its moments: diagonal over all parameters, or full over some of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dapcal.gaussians import DiagonalGaussian, FullGaussian, Gaussian
from dapcal.likelihoods import Likelihood
from dapcal.networks import frozen_copy, layout_of, plain
from dapcal.posteriors.network import NetworkPosterior
from dapcal.prior import Aware, make_prior


def diagonal(
    model: nn.Module,
    likelihood: Likelihood,
    scale: Mapping[str, Tensor],
    *,
    mean: Mapping[str, Tensor] | None = None,
    prior_scale: float | Mapping[str, float] = 1.0,
    draws: int = 50,
    seed: int = 0,
    aware: Aware = "*",
) -> NetworkPosterior:
    """N(mean, diag scale²) over the parameters named in `scale`; all others stay at the model's values.

    Args:
        model: the network; its weights are the mean where none is given.
        likelihood: p(y | outputs).
        scale: standard deviations by parameter name, shaped as the parameters.
        mean: means by parameter name.
        prior_scale: σ0 of the prior, one or by name pattern.
        draws: S.
        seed: of the draws.
        aware: parameters that a distance may widen.
    """
    random, shared = choose(model, list(scale), mean)
    layout = layout_of(random)
    for name, deviation in scale.items():
        if deviation.shape != random[name].shape or not (deviation >= 0).all():
            raise ValueError(
                f"Expected `scale[{name!r}]` >= 0 of shape {tuple(random[name].shape)}, got {tuple(deviation.shape)}"
            )
    moments = DiagonalGaussian(layout.flatten(random), layout.flatten(scale) ** 2)
    return _build(model, likelihood, random, shared, moments, prior_scale, draws, seed, aware)


def full(
    model: nn.Module,
    likelihood: Likelihood,
    covariance: Tensor,
    names: list[str],
    *,
    mean: Mapping[str, Tensor] | None = None,
    prior_scale: float | Mapping[str, float] = 1.0,
    draws: int = 50,
    seed: int = 0,
    aware: Aware = "*",
) -> NetworkPosterior:
    """N(mean, covariance) over the named parameters, flattened one after the other; all others stay fixed.

    Args:
        model: the network; its weights are the mean where none is given.
        likelihood: p(y | outputs).
        covariance: (P, P) over the named parameters.
        names: parameter names, e.g. those of the last layer, in the order of the covariance.
        mean: means by parameter name.
        prior_scale: σ0 of the prior, one or by name pattern.
        draws: S.
        seed: of the draws.
        aware: parameters that a distance may widen.
    """
    random, shared = choose(model, names, mean)
    moments = FullGaussian(layout_of(random).flatten(random), covariance)
    return _build(model, likelihood, random, shared, moments, prior_scale, draws, seed, aware)


def prior_of(posterior: NetworkPosterior, draws: int, seed: int = 0) -> NetworkPosterior:
    """The prior N(0, σ0² I) as a Gaussian posterior of the same network: what Transport moves to N(0, (σ0 + d)² I)."""
    if posterior.prior is None:
        raise ValueError("Expected a posterior with a prior; set it with posterior.with_prior(prior_scale)")
    variance = (posterior.prior.sigma0[posterior.prior.group] ** 2).to(posterior.center.device)  # float64: exactly σ0²
    moments = DiagonalGaussian(torch.zeros_like(posterior.center), variance)
    return NetworkPosterior(
        model=posterior.model,
        likelihood=posterior.likelihood,
        layout=posterior.layout,
        draws=moments.sample(draws, torch.Generator().manual_seed(seed)),
        center=moments.mean,
        shared=posterior.shared,
        gaussian=moments,
        prior=posterior.prior,
    )


def choose(
    model: nn.Module, names: list[str], mean: Mapping[str, Tensor] | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The named parameters (or the means given for them), and everything else."""
    model = plain(model)
    everything = {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    unknown = [n for n in names if n not in dict(model.named_parameters())]
    if unknown or not names:
        raise ValueError(
            f"Expected names of parameters, got {unknown or names}; the model has "
            f"{[n for n, _ in model.named_parameters()]}"
        )
    absent = [] if mean is None else [n for n in names if n not in mean]
    if absent:
        raise ValueError(f"Expected a mean for every random parameter, `mean` has none for {absent}")
    values = {n: everything[n] if mean is None else mean[n].detach().clone() for n in names}
    wrong = [n for n in names if values[n].shape != everything[n].shape]
    if wrong:
        raise ValueError(f"Expected means shaped as the model's parameters, got other shapes for {wrong}")
    return values, {n: t for n, t in everything.items() if n not in values}


def _build(
    model: nn.Module,
    likelihood: Likelihood,
    random: dict[str, Tensor],
    shared: dict[str, Tensor],
    moments: Gaussian,
    prior_scale: float | Mapping[str, float],
    draws: int,
    seed: int,
    aware: Aware,
) -> NetworkPosterior:
    layout = layout_of(random)
    return NetworkPosterior(
        model=frozen_copy(model),
        likelihood=likelihood,
        layout=layout,
        draws=moments.sample(draws, torch.Generator().manual_seed(seed)),
        center=moments.mean,
        shared=shared,
        gaussian=moments,
        prior=make_prior(layout.sizes, prior_scale, aware, moments.mean.device),
    )
