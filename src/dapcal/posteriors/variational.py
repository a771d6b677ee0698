"""Mean-field variational inference: a diagonal Gaussian that maximises the ELBO, started from the MAP."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from dapcal.data import Data, in_memory, size
from dapcal.gaussians import DiagonalGaussian
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
    kl_weight: float = 1.0,
    draws: int = 50,
    epochs: int = 100,
    learning_rate: float = 1e-3,
    batch_size: int = 128,
    samples: int = 1,
    initial_scale: float = 0.02,
    seed: int = 0,
    aware: Aware = "*",
    progress: Progress | None = None,
) -> NetworkPosterior:
    """q(θ) = N(μ, diag σ²) that maximises Σ_n E_q[log p(y_n | θ, x_n)] − λ KL(q ‖ N(0, σ0² I)).

    The mean starts at the model's weights, so pass a trained model (`dapcal.posteriors.map.fit(...).network`). The
    network runs in evaluation mode: batch-norm statistics stay as they are. Graves (2011), Blundell et al. (2015).

    Args:
        model: the trained network.
        likelihood: p(y | outputs); its free values (noise level) are learnt on.
        train: (inputs, targets), a Dataset or a DataLoader.
        prior_scale: σ0, one or by name pattern.
        kl_weight: λ; under 1 it tempers the posterior, which large networks need (with λ = 1 the mean-field posterior
            of a 36-million-parameter network collapses onto the prior).
        draws: S, fixed draws that predictions use.
        epochs: passes over the training data.
        learning_rate: Adam's at the start; it falls to zero along a cosine.
        batch_size: where `train` is no DataLoader.
        samples: draws of θ for each gradient.
        initial_scale: σ at the start.
        seed: of batches, gradients and draws.
        aware: parameters that a distance may widen, see `dapcal.prior.make_prior`.
        progress: called after every epoch.
    """
    if kl_weight < 0 or draws < 1:
        raise ValueError(f"Expected `kl_weight` >= 0 and `draws` >= 1, got {kl_weight} and {draws}")
    data = in_memory(train, "train")
    count = size(data)
    module = frozen_copy(model)
    random, shared = split_state(model)
    layout = layout_of(random)
    prior = make_prior(layout.sizes, prior_scale, aware, next(iter(random.values())).device)
    mean = layout.flatten(random).requires_grad_()
    log_scale = torch.full_like(mean, math.log(initial_scale)).requires_grad_()
    sigma0 = prior.sigma0[prior.group].to(mean.dtype)
    free = {n: t.to(mean.device).requires_grad_() for n, t in likelihood.free().items()}
    generator = torch.Generator().manual_seed(seed)

    def forward(vector: Tensor, x: Tensor) -> Tensor:
        return one_column(as_tensor(functional_call(module, {**shared, **layout.unflatten(vector)}, (x,))))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        noise = torch.randn(samples, len(mean), generator=generator, dtype=mean.dtype).to(mean.device)
        theta = mean + log_scale.exp() * noise  # (samples, P)
        moved = x.to(mean.device)
        outputs = forward(theta[0], moved)[None] if samples == 1 else vmap(forward, (0, None))(theta, moved)
        targets = likelihood.check(outputs, y.to(mean.device))
        penalty = kl_weight * divergence(mean, log_scale, sigma0) / count
        return penalty - likelihood.at(free).log_likelihood(outputs, targets).mean()

    minimise(
        loss,
        [mean, log_scale, *free.values()],
        data,
        epochs=epochs,
        learning_rate=learning_rate,
        batch_size=batch_size,
        generator=generator,
        progress=progress,
    )
    gaussian = DiagonalGaussian(mean.detach(), (2 * log_scale.detach()).exp())
    return NetworkPosterior(
        model=module,
        likelihood=likelihood.at({n: t.detach() for n, t in free.items()}),
        layout=layout,
        draws=gaussian.sample(draws, generator),
        center=gaussian.mean,
        shared=shared,
        gaussian=gaussian,
        prior=prior,
    )


def divergence(mean: Tensor, log_scale: Tensor, sigma0: float | Tensor) -> Tensor:
    """KL(N(mean, exp(2 log_scale)) ‖ N(0, σ0²)), summed.

    >>> divergence(torch.tensor([0.0]), torch.tensor([0.0]), 1.0).item()
    0.0
    """
    ratio = 2 * (log_scale - torch.as_tensor(sigma0, dtype=mean.dtype, device=mean.device).log())
    return 0.5 * (ratio.exp() + (mean / sigma0) ** 2 - 1 - ratio).sum()
