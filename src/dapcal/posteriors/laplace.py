"""Laplace approximation: a Gaussian at a trained network, with the curvature of its loss as precision.

    Σ = (Σ_n Jᵀ_n Λ_n J_n + diag 1/σ0²)⁻¹   at the MAP (MacKay 1992; Daxberger et al. 2021)

Predictions come from the linearised network f + J (θ − μ) by default, which is what the Gauss–Newton curvature belongs
to (Immer et al. 2021): Inflate and Transport then have closed forms. Or from draws that run through the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dapcal.data import Data, in_memory
from dapcal.gaussians import Gaussian
from dapcal.likelihoods import Likelihood
from dapcal.networks import (
    any_inputs,
    checked_outputs,
    first_input,
    frozen_copy,
    last_linear,
    layout_of,
    parameter_name,
    split_state,
)
from dapcal.posteriors._curvature import sums as curvature_sums
from dapcal.posteriors._curvature.prior_scale import HeldOut, MarginalLikelihood, ScaleChoice
from dapcal.posteriors._curvature.structures import Curvature, Diagonal, Full, Kronecker, Root, empirical_fisher, ggn
from dapcal.posteriors._curvature.sums import Setting
from dapcal.posteriors._training.checks import check
from dapcal.posteriors.gaussian import choose
from dapcal.posteriors.linear import LastLayer, Linear, Linearised
from dapcal.posteriors.network import NetworkPosterior
from dapcal.prior import Aware, make_prior

__all__ = [
    "Diagonal", "Full", "HeldOut", "Kronecker", "MarginalLikelihood", "empirical_fisher", "fit", "ggn", "last_layer",
]  # fmt: skip

Structure = type[Diagonal] | type[Kronecker] | type[Full]


@any_inputs
@torch.inference_mode(False)  # the curvature needs gradients
def fit(
    model: nn.Module,
    likelihood: Likelihood,
    train: Data,
    *,
    structure: Structure = Kronecker,
    curvature: Root = ggn,
    prior_scale: float | Mapping[str, float] | ScaleChoice | None = None,
    held_out: Data | None = None,
    linearised: bool = True,
    draws: int = 50,
    seed: int = 0,
    aware: Aware = "*",
    batch_size: int = 256,
) -> NetworkPosterior:
    """A Gaussian over all learnt parameters of a trained network.

    The network runs in evaluation mode (batch-norm statistics as they are, no dropout). One pass over the data, with a
    backward pass for each output (`ggn`) or one (`empirical_fisher`). Memory: `Full` P², others P, and the Jacobian of
    a few inputs at a time.

    Args:
        model: the trained network.
        likelihood: p(y | outputs), with its learnt noise level.
        train: what it was trained on: (inputs, targets), a Dataset or a DataLoader.
        structure: `Diagonal`, `Kronecker` or `Full`, of the covariance.
        curvature: `ggn` or `empirical_fisher`.
        prior_scale: σ0, one or by name pattern, or chosen by `MarginalLikelihood()` or `HeldOut(data)`; by default
            the best for `held_out`, or 1 where there are no such data.
        held_out: in-distribution data that the network was not trained on, to choose σ0 by.
        linearised: predict with the linearised network, else by draws through the network.
        draws: S.
        seed: of the draws.
        aware: parameters that a distance may widen.
        batch_size: where `train` is not a DataLoader.
    """
    check(model, likelihood)
    _check_finite(model)
    random, shared = split_state(model)
    sums: dict[type, Callable[..., Curvature]] = {
        Diagonal: curvature_sums.diagonal,
        Kronecker: curvature_sums.kronecker,
        Full: curvature_sums.full,
    }
    if structure not in sums:
        raise TypeError(f"Expected `structure` as laplace.Diagonal, laplace.Kronecker or laplace.Full, got {structure}")
    data = in_memory(train, "train")

    def curvature_of(setting: Setting) -> Curvature:
        return sums[structure](setting, data, batch_size)

    linear = Linearised() if linearised else None
    prior_scale = _scale_or_choice(prior_scale, held_out)
    return _approximate(
        model, likelihood, random, shared, curvature, curvature_of, linear, prior_scale, draws, seed, aware
    )


@any_inputs
@torch.inference_mode(False)
def last_layer(
    model: nn.Module,
    likelihood: Likelihood,
    train: Data,
    *,
    layer: str | None = None,
    structure: Structure = Full,
    curvature: Root = ggn,
    prior_scale: float | Mapping[str, float] | ScaleChoice | None = None,
    held_out: Data | None = None,
    draws: int = 50,
    seed: int = 0,
    aware: Aware = "*",
    batch_size: int = 256,
) -> NetworkPosterior:
    """A Gaussian over the last layer of a trained network; all before it is a fixed feature map.

    One forward pass over the data, no backward pass. Outputs are exactly linear in the random parameters, so nothing is
    approximated by linearising, and predictions cost one pass however many draws there are.

    Args:
        model: the trained network.
        likelihood: p(y | outputs), with its learnt noise level.
        train: what it was trained on: (inputs, targets), a Dataset or a DataLoader.
        layer: its name; by default the linear layer that runs last (a convolution is none; use `fit`).
        structure: `Full`, `Kronecker` or `Diagonal`, of the covariance.
        curvature: `ggn` or `empirical_fisher`.
        prior_scale: σ0, one or by name pattern, or chosen by `MarginalLikelihood()` or `HeldOut(data)`; by default
            the best for `held_out`, or 1 where there are no such data.
        held_out: in-distribution data that the network was not trained on, to choose σ0 by.
        draws: S.
        seed: of the draws.
        aware: parameters that a distance may widen.
        batch_size: where `train` is not a DataLoader.
    """
    if structure not in (Diagonal, Kronecker, Full):
        raise TypeError(f"Expected `structure` as laplace.Diagonal, laplace.Kronecker or laplace.Full, got {structure}")
    check(model, likelihood)
    _check_finite(model)
    data = in_memory(train, "train")
    network = frozen_copy(model)
    with torch.random.fork_rng(devices=[]):  # a loader draws a seed from the global generator
        example = next(iter(curvature_sums.batches(data, batch_size, next(network.parameters()).device)))[0][:2]
    name = last_linear(network, example[:1]) if layer is None else layer
    linear = LastLayer(name, _check_last(network, name, example))
    names = [parameter_name(name, n) for n in (("weight", "bias") if linear.bias else ("weight",))]
    random, shared = choose(model, names, None)

    prior_scale = _scale_or_choice(prior_scale, held_out)

    def curvature_of(setting: Setting) -> Curvature:
        return curvature_sums.last_layer(setting, linear, structure, data, batch_size)

    return _approximate(
        model, likelihood, random, shared, curvature, curvature_of, linear, prior_scale, draws, seed, aware
    )


@dataclass(frozen=True, eq=False)
class _Candidates:
    """One curvature, any prior scale."""

    curvature: Curvature
    template: NetworkPosterior  # all but moments and prior
    aware: Aware
    seed: int
    draws: int

    def log_evidence(self, sigma0: float) -> float:
        mean = self.template.center.double()
        precision = torch.full_like(mean, 1 / sigma0**2)
        fit = self.curvature.log_determinant(precision) - precision.log().sum() + (precision * mean**2).sum()
        return float(-0.5 * fit)

    def posterior(self, sigma0: float | Mapping[str, float], drawn: bool = True) -> NetworkPosterior:
        center = self.template.center
        prior = make_prior(self.template.layout.sizes, sigma0, self.aware, center.device)
        gaussian: Gaussian = self.curvature.gaussian(center, 1 / prior.sigma0[prior.group] ** 2)
        closed = self.template.linear is not None and not drawn
        draws = center[None] if closed else gaussian.sample(self.draws, torch.Generator().manual_seed(self.seed))
        return replace(self.template, draws=draws, gaussian=gaussian, prior=prior)


def _approximate(
    model: nn.Module,
    likelihood: Likelihood,
    random: dict[str, Tensor],
    shared: dict[str, Tensor],
    root: Root,
    curvature_of: Callable[[Setting], Curvature],
    linear: Linear | None,
    prior_scale: float | Mapping[str, float] | ScaleChoice,
    draws: int,
    seed: int,
    aware: Aware,
) -> NetworkPosterior:
    if draws < 1:
        raise ValueError(f"Expected `draws` >= 1, got {draws}")
    number = isinstance(prior_scale, float | int | Mapping)
    if not number and (isinstance(prior_scale, type) or not callable(prior_scale)):
        raise TypeError(
            "Expected `prior_scale` as a number, numbers by name pattern, MarginalLikelihood() or HeldOut(data), got "
            f"{prior_scale!r}"
        )
    if not callable(root):
        raise TypeError(f"Expected `curvature` as laplace.ggn or laplace.empirical_fisher, got {root!r}")
    layout = layout_of(random)
    center = layout.flatten(random)
    fixed = prior_scale if isinstance(prior_scale, float | int | Mapping) else 1.0  # a chosen σ0 is one for all
    prior = make_prior(layout.sizes, fixed, aware, center.device)
    frozen = frozen_copy(model)
    template = NetworkPosterior(frozen, likelihood, layout, center[None], center, shared, linear=linear)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):  # a loader draws a seed from the global generator
        curvature = curvature_of(Setting(frozen, shared, layout, center, likelihood, prior, root))
        candidates = _Candidates(curvature, template, aware, seed, draws)
        if isinstance(prior_scale, float | int | Mapping):
            return candidates.posterior(prior_scale)
        return candidates.posterior(prior_scale(candidates))


def _scale_or_choice(
    prior_scale: float | Mapping[str, float] | ScaleChoice | None, held_out: Data | None
) -> float | Mapping[str, float] | ScaleChoice:
    if prior_scale is None:
        return 1.0 if held_out is None else HeldOut(held_out)
    if held_out is not None:
        raise ValueError("Expected `prior_scale` or `held_out` to choose it by, got both; leave one out")
    return prior_scale


def _check_finite(model: nn.Module) -> None:
    odd = [name for name, tensor in model.named_parameters() if not tensor.detach().isfinite().all()]
    odd += [name for name, tensor in model.named_buffers() if tensor.isnan().any()]  # an attention mask may hold −inf
    if odd:
        raise ValueError(f"Expected a network with finite weights, got NaN or inf in {odd[:4]}; train it again")


def _check_last(network: nn.Module, name: str, x: Tensor) -> bool:
    """Whether the layer has a bias; refused where it is not a final linear layer."""
    modules = dict(network.named_modules())
    layer = modules.get(name)
    if not isinstance(layer, nn.Linear):
        linear = [n for n, m in modules.items() if isinstance(m, nn.Linear)]
        raise ValueError(f"Expected `layer` as the name of an nn.Linear, got `{name}`; the model has {linear}")
    if sum(p is layer.weight for m in network.modules() for p in m.parameters(recurse=False)) > 1:
        raise ValueError(
            f"The weights of `{name}` are tied to another layer: it is not a last layer alone; use laplace.fit"
        )
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def probe(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        """Values of both signs in place of the layer's own, which must come out as they are."""
        values = torch.linspace(-1e3, 1e3, output.numel(), dtype=output.dtype, device=output.device).view_as(output)
        seen.append((first_input(args, kwargs).clone(), output, values))
        return values.clone()

    handle = layer.register_forward_hook(probe, with_kwargs=True)
    try:
        with torch.no_grad():
            outputs = checked_outputs(network(x.to(layer.weight.device)), len(x))
    finally:
        handle.remove()
    if len(seen) != 1 or seen[0][0].ndim != 2 or not torch.equal(seen[0][2], outputs):
        raise ValueError(
            f"Expected `{name}` to run once, on (N, D), and to give the network's outputs as they are, but something "
            "follows it or it runs per place; name another layer, or use laplace.fit"
        )
    inputs, output, _ = seen[0]
    if not torch.allclose(output, nn.functional.linear(inputs, layer.weight, layer.bias), rtol=1e-4, atol=1e-5):
        raise ValueError(f"Expected `{name}` to be linear in its weights, but its class computes more; use laplace.fit")
    return layer.bias is not None
