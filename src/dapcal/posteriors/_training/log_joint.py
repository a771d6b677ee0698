"""The log joint of a network and its prior: what MAP maximises, SWAG averages around and SG-MCMC samples from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dapcal.data import Labelled, size
from dapcal.likelihoods import Likelihood
from dapcal.networks import (
    Layout,
    as_tensor,
    backward_in_evaluation,
    copied,
    frozen_copy,
    layout_of,
    one_column,
    run,
    split_state,
)
from dapcal.posteriors._training.checks import check
from dapcal.posteriors.training import Training
from dapcal.prior import Aware, Prior, make_prior


@dataclass(frozen=True, eq=False)
class LogJoint:
    """−(log p(y | θ, x) + log N(θ | 0, σ0² I)) per training input, of a module that is trained in place.

    Attributes:
        module: a copy of the model, in training mode.
        given: the likelihood as it was given.
        free: its values that are learnt too (noise level).
        layout: names and shapes of the learnt parameters.
        prior: σ0 and distance factors.
        data: the training data; those in memory have their targets as the likelihood wants them.
        training: how it is trained.
    """

    module: nn.Module
    given: Likelihood
    free: dict[str, Tensor]
    layout: Layout
    prior: Prior
    data: Labelled | DataLoader
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
        likelihood, outputs = self.given.at(self.free), self._outputs(x)
        targets = y.to(outputs.device)
        if isinstance(self.data, DataLoader):
            targets = likelihood.check(outputs, targets)
        return squares.sum() / (2 * self.count) - likelihood.log_likelihood(outputs, targets).mean()

    def held_out_nll(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean negative log-likelihood, in evaluation mode."""
        mode = self.module.training
        self.module.eval()
        try:
            outputs = self._outputs(x)
            targets = self.likelihood.check(outputs, y.to(outputs.device))
            return -self.likelihood.log_likelihood(outputs, targets).mean()
        finally:
            if mode:
                training_mode(self.module)

    @cached_property
    def count(self) -> int:
        """Number of training inputs N."""
        return size(self.data)

    @cached_property
    def _scales(self) -> list[Tensor]:
        sigma0 = self.prior.sigma0[self.prior.group].to(self.parameters[0])
        return list(self.layout.unflatten(sigma0).values())

    def _outputs(self, x: Tensor) -> Tensor:
        first = next(self.module.parameters())
        with self.training.autocast(first.device), backward_in_evaluation(self.module):
            return one_column(as_tensor(self.module(x.to(first.device)))).to(first.dtype)


def log_joint(
    model: nn.Module,
    likelihood: Likelihood,
    data: Labelled | DataLoader,
    prior_scale: float | Mapping[str, float],
    aware: Aware,
    training: Training,
) -> LogJoint:
    """The log joint of a copy of the model, from its present weights."""
    check(model, likelihood)
    module = training_mode(copied(model))
    layout = layout_of(split_state(module)[0])
    device = next(p for p in module.parameters() if p.requires_grad).device
    return LogJoint(
        module=module,
        given=likelihood,
        free={n: t.detach().clone().to(device).requires_grad_() for n, t in likelihood.free().items()},
        layout=layout,
        prior=make_prior(layout.sizes, prior_scale, aware, device),
        data=with_targets(data, likelihood, frozen_copy(model), training),
        training=training,
    )


def with_targets(
    data: Labelled | DataLoader, likelihood: Likelihood, model: nn.Module, training: Training
) -> Labelled | DataLoader:
    """Data in memory with all targets checked at once: a check of every minibatch would make a GPU wait for it."""
    if isinstance(data, DataLoader):
        return data
    device = next(model.parameters()).device
    with torch.no_grad(), training.autocast(device):
        one = one_column(as_tensor(run(model, data.x[:1])))
    targets = likelihood.check(one.expand(len(data.x), -1), data.y)
    return Labelled(data.x, targets.to(data.x.device))


def training_mode(module: nn.Module) -> nn.Module:
    """Training mode, but for batch norm whose parameters are all frozen: it keeps its statistics too."""
    module.train()
    for layer in module.modules():
        own = list(layer.parameters(recurse=False))
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and own and not any(p.requires_grad for p in own):
            layer.eval()
    return module
