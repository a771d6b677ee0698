"""Draws that the user brings: state dicts of trained networks, or one dict of stacked parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dapcal.likelihoods import Likelihood
from dapcal.networks import frozen_copy, layout_of, plain
from dapcal.posteriors.network import NetworkPosterior
from dapcal.prior import Aware, make_prior


def from_state_dicts(
    model: nn.Module,
    likelihood: Likelihood,
    states: Sequence[Mapping[str, Tensor]],
    *,
    prior_scale: float | Mapping[str, float] | None = None,
    aware: Aware = "*",
) -> NetworkPosterior:
    """Draws from a list of state dicts (MCMC samples, ensemble members, checkpoints).

    Args:
        model: a network whose names and shapes the states have.
        likelihood: p(y | outputs).
        states: one state dict a draw; buffers may differ between them.
        prior_scale: σ0, which Reweight needs; None where it has no meaning (ensembles).
        aware: parameters that a distance may widen; only with `prior_scale`.
    """
    if not states:
        raise ValueError("Expected at least one state dict, got none")
    model = plain(model)
    states = [{name.replace("_orig_mod.", ""): value for name, value in state.items()} for state in states]
    names = list(model.state_dict())
    own = {n for n, _ in [*model.named_parameters(), *model.named_buffers()]}  # tied names count once
    for number, state in enumerate(states):
        if set(state) != set(names):
            odd = sorted(set(state) ^ set(names))
            raise ValueError(
                f"Expected state dict {number} with the model's names, but {odd[:4]} are in only one of them"
            )
    return from_stacked(
        model,
        likelihood,
        {name: torch.stack([s[name] for s in states]) for name in names if name in own},
        prior_scale=prior_scale,
        aware=aware,
    )


def from_stacked(
    model: nn.Module,
    likelihood: Likelihood,
    stacked: Mapping[str, Tensor],
    *,
    prior_scale: float | Mapping[str, float] | None = None,
    aware: Aware = "*",
) -> NetworkPosterior:
    """Draws from one dict of tensors (S, ...); names that are not in it stay at the model's values."""
    model = plain(model)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    own = {**parameters, **buffers}
    unknown = [n for n in stacked if n not in own]
    if unknown or not any(n in parameters for n in stacked):
        raise ValueError(
            f"Expected parameter names of the model, got {unknown or list(stacked)}; it has {list(parameters)}"
        )
    counts = {len(t) for t in stacked.values()}
    if len(counts) != 1:
        raise ValueError(f"Expected as many draws of every parameter, got {sorted(counts)}")
    if counts == {0}:
        raise ValueError("Expected at least one draw, got none")
    for name, tensor in stacked.items():
        if tensor.shape[1:] != own[name].shape:
            raise ValueError(
                f"Expected draws of `{name}` of shape (S, *{tuple(own[name].shape)}), got {tuple(tensor.shape)}"
            )
        if not tensor.isfinite().all():
            raise ValueError(f"Expected finite draws, got NaN or inf in `{name}`")
    if prior_scale is None and aware != "*":
        raise ValueError("`aware` restricts the distance-aware prior, which needs `prior_scale`; give it too")
    random = {n: stacked[n].detach() for n in parameters if n in stacked}
    layout = layout_of({n: t[0] for n, t in random.items()})
    draws = layout.flatten(random, batch=1)
    return NetworkPosterior(
        model=frozen_copy(model),
        likelihood=likelihood,
        layout=layout,
        draws=draws,
        center=draws[0],
        shared={n: t.detach().clone() for n, t in own.items() if n not in stacked},
        buffers={n: stacked[n].detach() for n in buffers if n in stacked},
        prior=None if prior_scale is None else make_prior(layout.sizes, prior_scale, aware, draws.device),
    )
