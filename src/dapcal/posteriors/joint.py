"""The log joint of a network and its prior: what MAP maximises, SWAG averages around and SG-MCMC samples from."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from dapcal.likelihoods import Likelihood
from dapcal.networks import Layout, as_tensor, backward_in_evaluation, layout_of, one_column, split_state
from dapcal.posteriors.entry import check
from dapcal.posteriors.training import Training
from dapcal.prior import Aware, Prior, make_prior


@dataclass(frozen=True, eq=False)
class Joint:
    """−(log p(y | θ, x) + log N(θ | 0, σ0² I)) per training input, of a module that is trained in place.

    Attributes:
        module: a copy of the model, in training mode.
        given: the likelihood as it was given.
        free: its values that are learnt too (noise level).
        layout: names and shapes of the learnt parameters.
        prior: σ0 and distance factors.
        count: number of training inputs N.
        training: how it is trained.
    """

    module: nn.Module
    given: Likelihood
    free: dict[str, Tensor]
    layout: Layout
    prior: Prior
    count: int
    training: Training

    @cached_property
    def parameters(self) -> list[Tensor]:
        """The network's learnt parameters, in the order of the layout."""
        own = dict(self.module.named_parameters())
        return [own[name] for name in self.layout.names]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors that training changes, by name."""
        own = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        free = {f"likelihood {n}": t for n, t in self.free.items()}
        return {**own, **dict(self.module.named_buffers()), **free}

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood with what was learnt."""
        return self.given.at({n: t.detach() for n, t in self.free.items()})

    @property
    def vector(self) -> Tensor:
        """The learnt parameters as one vector, (P,)."""
        return torch.cat([p.detach().flatten() for p in self.parameters])

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean over a minibatch; the prior counts 1/N."""
        squares = torch.stack([((p / s) ** 2).sum() for p, s in zip(self.parameters, self._scales, strict=True)])
        return squares.sum() / (2 * self.count) + self._nll(x, y, self.given.at(self.free))

    def held_out_nll(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean negative log-likelihood, in evaluation mode."""
        mode = self.module.training
        self.module.eval()
        try:
            return self._nll(x, y, self.likelihood)
        finally:
            if mode:
                training_mode(self.module)

    @cached_property
    def _scales(self) -> list[Tensor]:
        sigma0 = self.prior.sigma0[self.prior.group].to(self.parameters[0])
        return list(self.layout.unflatten(sigma0).values())

    def _nll(self, x: Tensor, y: Tensor, likelihood: Likelihood) -> Tensor:
        first = next(self.module.parameters())
        with self.training.autocast(first.device), backward_in_evaluation(self.module):
            outputs = one_column(as_tensor(self.module(x.to(first.device)))).to(first.dtype)
        targets = likelihood.check(outputs, y.to(first.device))
        return -likelihood.log_likelihood(outputs, targets).mean()


def log_joint(
    model: nn.Module,
    likelihood: Likelihood,
    count: int,
    prior_scale: float | Mapping[str, float],
    aware: Aware,
    training: Training,
) -> Joint:
    """The log joint of a copy of the model, from its present weights."""
    check(model, likelihood)
    module = training_mode(copy.deepcopy(model))
    layout = layout_of(split_state(module)[0])
    device = next(p for p in module.parameters() if p.requires_grad).device
    return Joint(
        module=module,
        given=likelihood,
        free={n: t.detach().clone().to(device).requires_grad_() for n, t in likelihood.free().items()},
        layout=layout,
        prior=make_prior(layout.sizes, prior_scale, aware, device),
        count=count,
        training=training,
    )


def training_mode(module: nn.Module) -> nn.Module:
    """Training mode, but for batch norm whose parameters are all frozen: it keeps its statistics too."""
    module.train()
    for layer in module.modules():
        own = list(layer.parameters(recurse=False))
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and own and not any(p.requires_grad for p in own):
            layer.eval()
    return module
