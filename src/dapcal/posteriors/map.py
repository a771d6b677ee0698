"""MAP: one network, trained by the log joint. A point: it has no spread that a distance could widen."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dapcal.data import Data, in_memory, size
from dapcal.likelihoods import Likelihood
from dapcal.networks import as_tensor, frozen_copy, layout_of, one_column, split_state
from dapcal.posteriors.network import NetworkPosterior
from dapcal.posteriors.training import Progress, minimise
from dapcal.prior import Aware, make_prior


def fit(
    model: nn.Module,
    likelihood: Likelihood,
    train: Data,
    *,
    prior_scale: float | Mapping[str, float] = 1.0,
    epochs: int = 100,
    learning_rate: float = 1e-3,
    batch_size: int = 128,
    seed: int = 0,
    aware: Aware = "*",
    progress: Progress | None = None,
) -> NetworkPosterior:
    """Maximise log p(y | θ, x) + log N(θ | 0, σ0² I) with Adam, from the model's present weights.

    `posterior.network` is the trained module; the model passed in is left as it was. The seed sets the order of the
    batches; a model with dropout also draws from torch's global generator.

    Args:
        model: any module from inputs to outputs (N, C).
        likelihood: p(y | outputs); its free values (noise level) are learnt too.
        train: (inputs, targets), a Dataset or a DataLoader.
        prior_scale: σ0, one or by name pattern.
        epochs: passes over the training data.
        learning_rate: Adam's at the start; it falls to zero along a cosine.
        batch_size: where `train` is no DataLoader.
        seed: order of the batches.
        aware: parameters that a distance may widen, see `dapcal.prior.make_prior`.
        progress: called after every epoch.
    """
    data = in_memory(train, "train")
    count = size(data)
    module = copy.deepcopy(model).train()
    layout = layout_of(split_state(module)[0])
    parameters = [p for p in module.parameters() if p.requires_grad]
    device = parameters[0].device
    prior = make_prior(layout.sizes, prior_scale, aware, device)
    sigma0 = layout.unflatten(prior.sigma0[prior.group].to(parameters[0])).values()
    free = {n: t.to(device).requires_grad_() for n, t in likelihood.free().items()}

    def loss(x: Tensor, y: Tensor) -> Tensor:
        outputs = one_column(as_tensor(module(x.to(device))))
        targets = likelihood.check(outputs, y.to(device))
        squares = torch.stack([((p / s) ** 2).sum() for p, s in zip(parameters, sigma0, strict=True)])
        return squares.sum() / (2 * count) - likelihood.at(free).log_likelihood(outputs, targets).mean()

    minimise(
        loss,
        [*parameters, *free.values()],
        data,
        epochs=epochs,
        learning_rate=learning_rate,
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(seed),
        progress=progress,
    )
    learnt = likelihood.at({n: t.detach() for n, t in free.items()})
    return point(module, learnt, prior_scale=prior_scale, aware=aware)


def point(
    model: nn.Module,
    likelihood: Likelihood,
    *,
    prior_scale: float | Mapping[str, float] = 1.0,
    aware: Aware = "*",
) -> NetworkPosterior:
    """A trained network as a posterior of one draw."""
    random, shared = split_state(model)
    layout = layout_of(random)
    center = layout.flatten(random)
    prior = make_prior(layout.sizes, prior_scale, aware, center.device)
    return NetworkPosterior(frozen_copy(model), likelihood, layout, center[None], center, shared, prior=prior)
