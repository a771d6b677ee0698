"""posteriors (normal-computing): states of its variational, Laplace, Kalman and SG-MCMC methods as posteriors.

In use:

    for batch in train_loader:
        state, _ = transform.update(state, batch)
    posterior = dapcal.adapters.posteriors_library.from_state(state, model, Categorical(), prior_scale=1.0)
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dapcal.likelihoods import Likelihood
from dapcal.posteriors import gaussian, samples
from dapcal.posteriors.network import NetworkPosterior
from dapcal.prior import Aware

_MOMENTS = ("log_sd_diag", "sd_diag", "prec_diag", "L_factor", "prec", "cov")


def from_state(
    state: Any,
    model: nn.Module,
    likelihood: Likelihood,
    *,
    prior_scale: float | Mapping[str, float] | None = None,
    draws: int = 50,
    seed: int = 0,
    aware: Aware = "*",
) -> NetworkPosterior:
    """A Gaussian from a state that has moments, or the draws of a list of states.

    Moments and draws are taken as they are: where the log posterior is divided by the number N of data, as the library
    advises, `vi` and `sgmcmc` need the temperature 1/N, and `laplace` a log posterior that is not divided.

    Args:
        state: of `vi.diag`, `vi.dense`, `laplace.*` or `ekf.*`; or a sequence of `sgmcmc` states or of their `params`;
            or one dict of stacked parameters (S, ...).
        model: the network, whose parameter names `params` has; parameters that are not in it stay at its values.
        likelihood: p(y | outputs).
        prior_scale: σ0 of the log posterior's prior, which the library does not know; without it `Inflate` works and
            `Transport` and `Reweight` do not.
        draws: S, for Gaussians.
        seed: of the draws, for Gaussians.
        aware: parameters that a distance may widen; only with `prior_scale`.
    """
    if prior_scale is None and aware != "*":
        raise ValueError("`aware` restricts the distance-aware prior, which needs `prior_scale`; give it too")
    moments = [name for name in _MOMENTS if getattr(state, name, None) is not None]
    if not moments:
        stacked = _stacked(state, model)
        return samples.from_stacked(model, likelihood, stacked, prior_scale=prior_scale, aware=aware)
    if draws < 1:
        raise ValueError(f"Expected `draws` >= 1, got {draws}")
    mean = _named(state.params, model)
    options: dict[str, Any] = {"mean": mean, "draws": draws, "seed": seed, "aware": aware}
    options["prior_scale"] = 1.0 if prior_scale is None else prior_scale
    kind, value = moments[0], getattr(state, moments[0])
    if kind.endswith("_diag"):
        scale = {name: _deviation(kind, name, value[name].detach()) for name in mean}
        posterior = gaussian.diagonal(model, likelihood, scale, **options)
    else:
        names = _flat_order(state.params)
        posterior = gaussian.full(model, likelihood, _covariance(kind, value.detach()), names, **options)
    return posterior if prior_scale is not None else replace(posterior, prior=None)


def _deviation(kind: str, name: str, value: Tensor) -> Tensor:
    """σ from its log, itself, or the precision."""
    if kind != "prec_diag":
        return value.exp() if kind == "log_sd_diag" else value
    if not (value > 0).all():
        raise ValueError(
            f"Expected a precision > 0 everywhere, got {float(value.min()):.3g} in `{name}`; start from the prior's, "
            "init_prec_diag=1/σ0²"
        )
    return value.rsqrt()


def _covariance(kind: str, value: Tensor) -> Tensor:
    """Σ (P, P) from itself, the precision, or the entries of L in L Lᵀ, row by row; float64."""
    value = value.double()
    if kind == "cov":
        return value
    if kind == "prec":
        factor, failed = torch.linalg.cholesky_ex(value)
        if failed:
            raise ValueError(
                "Expected a positive definite precision, got one that is not; start from the prior's, init_prec=1/σ0²"
            )
        return torch.cholesky_inverse(factor)
    size = (math.isqrt(8 * len(value) + 1) - 1) // 2
    lower = value.new_zeros(size, size)
    rows, columns = torch.tril_indices(size, size, device=value.device)
    lower[rows, columns] = value
    return lower @ lower.T


def _flat_order(params: Mapping[str, Tensor]) -> list[str]:
    """The library flattens with optree: a dict by sorted names, an OrderedDict as it stands."""
    return list(params) if isinstance(params, OrderedDict) else sorted(params)


def _stacked(state: Any, model: nn.Module) -> dict[str, Tensor]:
    """Draws (S, ...) by name from a sequence of states or parameters, or from parameters stacked already."""
    params = getattr(state, "params", state)  # torch.stack of states has the parameters of each in a list
    if isinstance(params, Sequence) and not isinstance(params, str):
        each = [_named(getattr(one, "params", one), model) for one in params]
        if not each:
            raise ValueError("Expected at least one state, got none")
        if any(set(one) != set(each[0]) for one in each):
            raise ValueError("Expected states of one and the same network, got different parameter names")
        return {name: torch.stack([one[name] for one in each]) for name in each[0]}
    if hasattr(state, "params"):
        raise ValueError(
            f"Expected moments ({', '.join(_MOMENTS)}) or several draws, got one {type(state).__name__}, which is a "
            "single draw; collect states along the chain and pass the list"
        )
    return _named(params, model)


def _named(params: Any, model: nn.Module) -> dict[str, Tensor]:
    """Detached parameters by name, from a dict or a TensorDict."""
    if not hasattr(params, "items"):
        raise TypeError(
            f"Expected parameters by name, got {type(params).__name__}; run the method on "
            "dict(model.named_parameters())"
        )
    named = {str(name): tensor.detach() for name, tensor in params.items()}
    known = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    unknown = [name for name in named if name not in known]
    if unknown or not named:
        raise ValueError(
            f"Expected names of the model's parameters, got {unknown or 'none'}; it has "
            f"{[name for name, _ in model.named_parameters()]}; run the method on dict(model.named_parameters())"
        )
    return named
