"""laplace-torch: a fitted `Laplace` object as a posterior, with its diagonal, Kronecker or full covariance.

In use:

    la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="kron")
    la.fit(train_loader)
    posterior = dapcal.adapters.laplace_torch.from_laplace(la)

Predictions come from the linearised network, as they do there by default (`pred_type="glm"`).
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dapcal.gaussians import Block, DiagonalGaussian, FullGaussian, Gaussian, KroneckerGaussian
from dapcal.likelihoods import Categorical, Likelihood
from dapcal.likelihoods import Gaussian as GaussianLikelihood
from dapcal.networks import layout_of
from dapcal.posteriors.linear import LastLayer, Linear, Linearised
from dapcal.posteriors.network import NetworkPosterior
from dapcal.prior import Aware, make_prior


class Moments(NamedTuple):
    """What a Laplace approximation says about the weights."""

    names: tuple[str, ...]  # of the random parameters, in the order of the flat vector
    mean: Tensor  # (P,)
    gaussian: Gaussian
    prior_scale: dict[str, float]  # σ0 by name


def from_laplace(
    la: Any,
    *,
    likelihood: Likelihood | None = None,
    linearised: bool = True,
    draws: int = 50,
    seed: int = 0,
    aware: Aware = "*",
) -> NetworkPosterior:
    """N(θ_MAP, P⁻¹) with P = H/(σ²T) + diag(prior precision), as laplace-torch has it (Daxberger et al. 2021).

    σ0 is 1/√(prior precision), so optimise the prior precision before. All weights or the last layer may be random;
    what is not stays fixed.

    Args:
        la: fitted, `subset_of_weights` "all" or "last_layer", `hessian_structure` "diag", "kron" or "full".
        likelihood: p(y | outputs); by default Categorical for "classification", and for "regression" Gaussian with
            the noise `la.sigma_noise`.
        linearised: predict with the linearised network, else by draws through the network (`pred_type="nn"` there). A
            last layer is linear anyway.
        draws: S.
        seed: of the draws.
        aware: parameters that a distance may widen, see `dapcal.prior.make_prior`.
    """
    if draws < 1:
        raise ValueError(f"Expected `draws` >= 1, got {draws}")
    moments = moments_of(la)
    model = network_of(la)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    layout = layout_of({name: parameters[name] for name in moments.names})
    shared = {n: t.detach().clone() for n, t in {**parameters, **buffers}.items() if n not in moments.names}
    return NetworkPosterior(
        model=model,
        likelihood=_likelihood_of(la) if likelihood is None else likelihood,
        layout=layout,
        draws=moments.gaussian.sample(draws, torch.Generator().manual_seed(seed)),
        center=moments.mean,
        shared=shared,
        gaussian=moments.gaussian,
        prior=make_prior(layout.sizes, moments.prior_scale, aware, moments.mean.device),
        linear=_linear(la, moments.names, linearised),
    )


def moments_of(la: Any) -> Moments:
    """Names, mean, covariance and prior scale of a fitted Laplace approximation; refuses what has no such moments."""
    _check(la)
    parameters = _random_parameters(la)
    sizes = {name: p.numel() for name, p in parameters.items()}
    mean = la.mean.detach().clone()
    if mean.shape != (sum(sizes.values()),):
        raise ValueError(
            f"Expected `la.mean` over {sum(sizes.values())} parameters, got shape {tuple(mean.shape)}; fit it again "
            "with la.fit(train_loader)"
        )
    variances = _prior_variances(la, sizes).to(mean.device)  # (P,)
    precision = la.posterior_precision
    gaussian: Gaussian
    if hasattr(precision, "eigenvalues"):
        gaussian = _kronecker(mean, precision, sizes, variances)
    elif precision.ndim == 1:
        gaussian = DiagonalGaussian(mean, _at_most(precision.detach().double().reciprocal(), variances))
    else:
        gaussian = FullGaussian(mean, _inverse(precision.detach().double()))
    starts = torch.tensor([0, *list(sizes.values())[:-1]]).cumsum(0)
    prior_scale = dict(zip(sizes, variances[starts].sqrt().tolist(), strict=True))
    return Moments(tuple(sizes), mean, gaussian, prior_scale)


def _linear(la: Any, names: tuple[str, ...], linearised: bool) -> Linear | None:
    if _last_layer(la) is not None:
        return LastLayer(names[0].removesuffix(".weight"), bias=len(names) == 2)
    return Linearised() if linearised else None


def network_of(la: Any) -> nn.Module:
    """A frozen copy of the user's network without the hooks and activations that the curvature backends leave on it."""
    original: nn.Module = la.model if _last_layer(la) is None else la.model.model
    # activations with a graph (BackPACK keeps them as attributes) cannot be copied, nor are they needed
    left = [v for m in original.modules() for v in vars(m).values() if isinstance(v, Tensor) and not v.is_leaf]
    network = copy.deepcopy(original, {id(tensor): None for tensor in left}).eval().requires_grad_(False)
    for module in network.modules():
        hooks = module._forward_hooks
        for key in [k for k, hook in hooks.items() if getattr(hook, "__module__", "").split(".")[0] in _BACKENDS]:
            del hooks[key]
    return network


_BACKENDS = ("laplace", "backpack", "asdl", "curvlinops")


def _check(la: Any) -> None:
    """What has no Gaussian over named weights, centred prior included, is refused."""
    kind = type(la).__name__
    if hasattr(la, "n_params_subnet"):
        raise TypeError(
            f"Expected a Laplace approximation over all weights or the last layer, got {kind}: a subnetwork takes "
            "single entries of a weight matrix, while a prior group is whole parameters; use 'last_layer' weights"
        )
    if not hasattr(type(la), "posterior_precision"):  # of the class: the property raises before fitting
        raise TypeError(
            f"Expected a fitted laplace.Laplace object with a posterior over weights, got {kind}; functional "
            "(Gaussian-process) approximations have none, use hessian_structure 'diag', 'kron' or 'full'"
        )
    if getattr(la, "H", None) is None or (hasattr(la, "H_facs") and la.H_facs is None) or not la.n_data:
        raise ValueError(f"Expected a fitted {kind}, got one without a curvature; call la.fit(train_loader) first")
    if isinstance(la.posterior_precision, tuple):
        raise TypeError(
            f"Expected a 'diag', 'kron' or 'full' covariance, got {kind}; refit with hessian_structure='kron'"
        )
    if torch.as_tensor(la.prior_mean).count_nonzero():
        raise ValueError(
            "Expected a prior with mean 0, got `la.prior_mean` different from 0: the distance-aware prior widens "
            "N(0, σ0²); refit with prior_mean=0"
        )


def _last_layer(la: Any) -> nn.Module | None:
    """The random layer of a last-layer approximation, whose `la.model` wraps the user's network."""
    return getattr(la.model, "last_layer", None) if hasattr(la.model, "forward_with_features") else None


def _random_parameters(la: Any) -> dict[str, Tensor]:
    layer = _last_layer(la)
    if layer is None:
        return {n: p for n, p in la.model.named_parameters() if p.requires_grad}
    prefix = next(name for name, module in la.model.model.named_modules() if module is layer)
    return {f"{prefix}.{n}": p for n, p in layer.named_parameters()}


def _prior_variances(la: Any, sizes: dict[str, int]) -> Tensor:
    """1/precision of every parameter (P,), from one number, one a parameter tensor, or one an entry."""
    precision = torch.as_tensor(la.prior_precision).detach().double().flatten()
    total, counts = sum(sizes.values()), torch.tensor(list(sizes.values()), device=precision.device)
    if len(precision) == 1:
        precision = precision.expand(total)
    elif len(precision) == len(sizes):
        precision = precision.repeat_interleave(counts)
    if len(precision) != total:
        raise ValueError(
            f"Expected `la.prior_precision` of length 1, {len(sizes)} (parameter tensors) or {total} (entries), got "
            f"{len(precision)}"
        )
    if not (precision > 0).all() or not precision.isfinite().all():
        raise ValueError("Expected a prior precision > 0 everywhere; set it with la.prior_precision or optimise it")
    for name, part in zip(sizes, precision.split(counts.tolist()), strict=True):
        if (part != part[0]).any():
            raise ValueError(
                f"Expected one prior precision within each parameter, got {float(part.min()):.3g} to "
                f"{float(part.max()):.3g} within `{name}`; refit with a scalar or layer-wise prior "
                "(la.optimize_prior_precision(prior_structure='layerwise'))"
            )
    return precision.reciprocal()


def _kronecker(mean: Tensor, precision: Any, sizes: dict[str, int], variances: Tensor) -> KroneckerGaussian:
    """P = (U ⊗ V)(λ_U ⊗ λ_V + δ)(U ⊗ V)ᵀ a weight matrix, Q (λ + δ) Qᵀ a bias."""
    blocks, parts, start = [], [], 0
    deltas = precision.deltas.detach().double().expand(len(precision.eigenvalues))
    for values, vectors, delta in zip(precision.eigenvalues, precision.eigenvectors, deltas, strict=True):
        rows = values[0].detach().double()
        columns = values[1].detach().double() if len(values) == 2 else rows.new_ones(1)
        if precision.damping and len(values) == 2:
            entries = torch.outer(rows + delta.sqrt(), columns + delta.sqrt())
        else:
            entries = torch.outer(rows, columns) + delta
        index = torch.arange(start, start + entries.numel(), device=mean.device).reshape(entries.shape)
        right = vectors[1] if len(vectors) == 2 else vectors[0].new_ones(1, 1)
        blocks.append(Block(index, vectors[0].detach().clone(), right.detach().clone()))
        parts.append(entries.flatten().reciprocal())
        start += entries.numel()
    if [part.numel() for part in parts] != list(sizes.values()):
        raise ValueError(
            f"Expected one Kronecker block a parameter, of sizes {list(sizes.values())}, got "
            f"{[part.numel() for part in parts]}; layers that are frozen in part cannot be read, freeze them whole"
        )
    return KroneckerGaussian(mean, _at_most(torch.cat(parts), variances), tuple(blocks))


def _at_most(variance: Tensor, prior_variance: Tensor) -> Tensor:
    """Where data say nothing the posterior is the prior: float32 curvature may miss that by a rounding error."""
    rounding = variance <= prior_variance * (1 + 1e-6)
    return torch.where(rounding, torch.minimum(variance, prior_variance), variance)


def _inverse(precision: Tensor) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(precision)
    if failed:
        raise ValueError(
            "Expected a positive definite posterior precision, got one that is not; raise the prior precision, or use "
            "a GGN backend in place of the Hessian"
        )
    return torch.cholesky_inverse(factor)


def _likelihood_of(la: Any) -> Likelihood:
    name = str(getattr(la.likelihood, "value", la.likelihood))
    if name == "classification":
        return Categorical()
    if name == "regression":
        return GaussianLikelihood(noise=float(la.sigma_noise))
    raise ValueError(f"Expected `la.likelihood` 'classification' or 'regression', got {name!r}; pass `likelihood`")
