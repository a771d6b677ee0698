"""The posterior over a network's parameters that all parametric methods return."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from dapcal.gaussians import Gaussian
from dapcal.likelihoods import Likelihood
from dapcal.moments import OutputMoments
from dapcal.networks import Blend, Layout, Pass, evaluate, open_pass
from dapcal.posteriors.linear import Linear, OutputsOf
from dapcal.prior import Aware, Prior, make_prior
from dapcal.storing import Stores

MOST_MEMBERS = 32  # draws of which each may be looked at for its features; of more one network stands for all


@dataclass(frozen=True, eq=False)
class NetworkPosterior:
    """Draws of a network's parameters, with moments where they come from a Gaussian.

    Attributes:
        model: a frozen copy of the network; its own weights are never used.
        likelihood: p(y | outputs), with what was learnt (noise level).
        layout: names and shapes of the random parameters.
        draws: (S, P).
        center: the random parameters of the network that stands for the posterior, (P,).
        shared: parameters and buffers that are the same in every draw.
        buffers: buffers that differ between draws (batch-norm statistics of an ensemble), each (S, ...).
        gaussian: moments over the flat vector, or None.
        prior: σ0 and distance factors per parameter group, or None where σ0 has no meaning.
        linear: how outputs follow linearly from the parameters (a last layer, a linearised network); None for draws
            that run through the network.
        central: shared parameters of the network that stands for the posterior, where it has others (members that were
            trained again, beside the network whose features give distances).
        blend: trees whose outputs are weighed with those of every draw that runs through the network; None: none.
    """

    stores = Stores(given={"model": "model", "likelihood": "likelihood"})

    model: nn.Module
    likelihood: Likelihood
    layout: Layout
    draws: Tensor
    center: Tensor
    shared: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    gaussian: Gaussian | None = None
    prior: Prior | None = None
    linear: Linear | None = None
    central: dict[str, Tensor] = field(default_factory=dict)
    blend: Blend | None = None

    def __repr__(self) -> str:
        draws, parameters = self.draws.shape
        kind = type(self.linear or self.gaussian).__name__ if self.linear or self.gaussian else "draws"
        return (
            f"NetworkPosterior({type(self.model).__name__}, {self.likelihood}, {draws} draws of {parameters} "
            f"parameters, {kind})"
        )

    def outputs(self, x: Tensor) -> Tensor:
        """Outputs of all draws, (S, N, C)."""
        if self.linear is not None:
            return self.linear.outputs(self, self.draws, x)
        open_one = open_pass(self.network, x)
        return self._blended(self._evaluated(x, open_one if self._first_is_network else None, open_one), x)

    def layer_inputs(self, layer: str, x: Tensor) -> Tensor:
        """What enters a layer in every draw, (S, N, ...): caught before, or by running all of them."""
        open_one = open_pass(self.network, x)
        if open_one is not None and layer in open_one.by_draw:
            return open_one.by_draw[layer]
        own = Pass(self.network, x, (), (layer,))
        self._evaluated(x, None, own)
        if layer not in own.by_draw:
            raise ValueError(f"Expected layer `{layer}` to run once in a forward pass, it did not; name another")
        if open_one is not None:
            open_one.by_draw.update(own.by_draw)
        return own.by_draw[layer]

    def outputs_at(self, draws: Tensor, x: Tensor) -> Tensor:
        """Outputs of other parameter vectors (S, P) in place of the draws."""
        if self.linear is not None:
            return self.linear.outputs(self, draws, x)
        own = {**self.layout.unflatten(draws), **self.buffers}
        return self._blended(evaluate(self.model, own, self.shared, x), x)

    def prepared(self, x: Tensor) -> OutputsOf:
        """Outputs of other parameter vectors at some of the inputs, for many calls."""
        if self.linear is not None:
            return self.linear.prepared(self, x)
        return lambda draws, rows: self.outputs_at(draws, x[rows])

    def moments(self, x: Tensor, moving: bool = False) -> OutputMoments | None:
        """Closed-form moments, where outputs are linear in the parameters."""
        return None if self.linear is None else self.linear.moments(self, x, moving)

    @cached_property
    def network(self) -> nn.Module:
        """The network at the center: MAP, posterior mean, or first member."""
        module = copy.deepcopy(self.model)
        first = {name: stacked[0] for name, stacked in self.buffers.items() if name not in self.shared}
        own = {**self.shared, **self.central, **self.layout.unflatten(self.center), **first}
        with torch.no_grad():
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                tensor.copy_(own[name])
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in self.layout.names)
        return module

    @property
    def alone(self) -> nn.Module | None:
        """The network that a Gaussian lies around, as it was before; draws without one have none."""
        return None if self.gaussian is None else self.network

    def narrowed(self, share: float) -> NetworkPosterior:
        """Deviations from the network at the center times `share`, as in a cold posterior; 0 is that network alone."""
        gaussian = None if self.gaussian is None else self.gaussian.narrowed(share)
        return replace(self, draws=self.center + share * (self.draws - self.center), gaussian=gaussian)

    def _evaluated(self, x: Tensor, first: Pass | None, every: Pass | None) -> Tensor:
        return evaluate(self.model, self._of_draws, self.shared, x, first=first, every=every)

    @cached_property
    def _of_draws(self) -> dict[str, Tensor]:
        """Parameters and buffers that differ between draws, each (S, ...), as views."""
        return {**self.layout.unflatten(self.draws), **self.buffers}

    def _blended(self, outputs: Tensor, x: Tensor) -> Tensor:
        return outputs if self.blend is None else self.blend(outputs, x)

    @cached_property
    def are_members(self) -> bool:
        """Whether the draws are a few networks of their own: an ensemble, or draws that were brought.

        Draws that share weights are not: the features of one are nearly those of all.
        """
        apart = all(name in self.layout.names for name, _ in self.model.named_parameters())
        return apart and self.linear is None and self.gaussian is None and 2 <= len(self.draws) <= MOST_MEMBERS

    @cached_property
    def _first_is_network(self) -> bool:
        """Whether the first draw is the network that features are taken from (an ensemble's first member)."""
        return not self.central and bool(torch.equal(self.draws[0], self.center))

    @cached_property
    def squared_norms(self) -> Tensor | None:
        """‖θ_s‖² per group of the prior, (S, G)."""
        if self.prior is None:
            return None
        zeros, group = torch.zeros_like(self.prior.sigma0), self.prior.group
        return torch.stack([zeros.index_add(0, group, draw.double() ** 2) for draw in self.draws])

    def with_prior(self, prior_scale: float | Mapping[str, float], aware: Aware = "*") -> NetworkPosterior:
        """The same draws under another σ0 or with other distance-aware parameters."""
        return replace(self, prior=make_prior(self.layout.sizes, prior_scale, aware, self.draws.device))
