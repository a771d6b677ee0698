"""Mean-field variational inference: a diagonal Gaussian that maximises the ELBO, started from the MAP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.data import DataLoader

from dapcal.data import Data, Labelled, batch_count, in_memory, size
from dapcal.gaussians import DiagonalGaussian
from dapcal.likelihoods import Likelihood
from dapcal.networks import (
    any_inputs,
    as_tensor,
    backward_in_evaluation,
    evaluate,
    frozen_copy,
    layout_of,
    one_column,
    split_state,
    vectorises,
    vectorising,
)
from dapcal.posteriors._training import checkpoints
from dapcal.posteriors._training.checks import check
from dapcal.posteriors._training.flipout import Flipout
from dapcal.posteriors._training.log_joint import with_targets
from dapcal.posteriors._training.mean_field import divergence, fixed_draws, mixture_nll, warn_if_collapsed
from dapcal.posteriors._training.trainer import minimise
from dapcal.posteriors.network import NetworkPosterior
from dapcal.posteriors.training import Options, Training
from dapcal.prior import Aware, make_prior


@any_inputs
def fit(
    model: nn.Module,
    likelihood: Likelihood,
    train: Data,
    *,
    prior_scale: float | Mapping[str, float] = 1.0,
    kl_weight: float = 1.0,
    warm_up: int = 0,
    flipout: bool = False,
    samples: int = 1,
    initial_scale: float = 0.02,
    draws: int = 50,
    seed: int = 0,
    aware: Aware = "*",
    **options: Unpack[Options],
) -> NetworkPosterior:
    """q(θ) = N(μ, diag σ²) that maximises Σ_n E_q[log p(y_n | θ, x_n)] − λ KL(q ‖ N(0, σ0² I)).

    The mean starts at the model's weights, so pass a trained model (`dapcal.posteriors.map.fit(...).network`). The
    network runs in evaluation mode: batch-norm statistics stay as they are, dropout is off. Graves (2011), Blundell et
    al. (2015).

    Args:
        model: the trained network.
        likelihood: p(y | outputs); its free values (noise level) are learnt on.
        train: (inputs, targets), a Dataset or a DataLoader.
        prior_scale: σ0, one or by name pattern.
        kl_weight: λ; under 1 it tempers the posterior, which large networks need (with λ = 1 the mean-field posterior
            of a 36-million-parameter network collapses onto the prior).
        warm_up: epochs over which the KL's weight rises from 0 to λ.
        flipout: noise of its own signs for every input of a minibatch; a step costs about twice as much.
        samples: draws of θ for each gradient.
        initial_scale: σ at the start.
        draws: S, fixed draws that predictions use.
        seed: of batches, gradients and draws.
        aware: parameters that a distance may widen, see `dapcal.prior.make_prior`.
        options: epochs, learning rate and all else of `dapcal.posteriors.training.Training`.
    """
    if kl_weight < 0 or draws < 1 or samples < 1 or warm_up < 0 or not initial_scale > 0:
        raise ValueError(
            "Expected `kl_weight` and `warm_up` >= 0, `draws` and `samples` >= 1, `initial_scale` > 0, got "
            f"{kl_weight}, {warm_up}, {draws}, {samples}, {initial_scale}"
        )
    check(model, likelihood)
    training = Training(**options)
    module = frozen_copy(model)
    data = with_targets(in_memory(train, "train"), likelihood, module, training)
    random, shared = split_state(model)
    layout = layout_of(random)
    device = next(iter(random.values())).device
    prior = make_prior(layout.sizes, prior_scale, aware, device)
    mean = layout.flatten(random).requires_grad_()
    log_scale = torch.full_like(mean, math.log(initial_scale)).requires_grad_()
    sigma0 = prior.sigma0[prior.group].to(mean.dtype)
    free = {n: t.detach().clone().to(device).requires_grad_() for n, t in likelihood.free().items()}
    generator = torch.Generator().manual_seed(seed)
    count, warm_steps = size(data), warm_up * batch_count(data, training.batch_size)
    step = torch.zeros((), dtype=torch.long)
    drawn = fixed_draws(mean, seed)
    flipped = Flipout(module, shared, _example(data)) if flipout else None

    def forward(vector: Tensor, x: Tensor) -> Tensor:
        return one_column(as_tensor(functional_call(module, {**shared, **layout.unflatten(vector)}, (x,))))

    together = samples > 1 and vectorises(
        module,
        lambda own, x: as_tensor(functional_call(module, {**shared, **own}, (x,))),
        layout.unflatten(mean.detach()[None]),
        _example(data).to(device),
    )

    def outputs_of(x: Tensor) -> Tensor:
        noise = torch.randn(samples, len(mean), dtype=mean.dtype, device=device) * log_scale.exp()
        with training.autocast(device), backward_in_evaluation(module):
            if flipped is not None:
                own = layout.unflatten(mean)
                return torch.stack([one_column(as_tensor(flipped(own, layout.unflatten(n), x))) for n in noise])
            theta = mean + noise  # (samples, P)
            if not together:
                return torch.stack([forward(vector, x) for vector in theta])
            with vectorising():
                return vmap(forward, (0, None))(theta, x)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        outputs = outputs_of(x.to(device)).to(mean.dtype)
        targets = y.to(device)
        if isinstance(data, DataLoader):
            targets = likelihood.check(outputs, targets)
        weight = kl_weight * (min(1.0, int(step.add_(1)) / warm_steps) if warm_steps else 1.0)
        penalty = weight * divergence(mean, log_scale, sigma0) / count
        return penalty - likelihood.at(free).log_likelihood(outputs, targets).mean()

    def held_out_nll(x: Tensor, y: Tensor) -> Tensor:
        theta = drawn(mean, log_scale.exp())
        return mixture_nll(evaluate(module, layout.unflatten(theta), shared, x), y, likelihood.at(_detached(free)))

    minimise(
        loss,
        [mean, log_scale, *free.values()],
        {"mean": mean, "log_scale": log_scale, "step": step, **free},
        data,
        training=training,
        generator=generator,
        method="variational",
        settings={
            "model": checkpoints.of_model(model), "prior_scale": prior_scale, "likelihood": likelihood,
            "kl_weight": kl_weight, "warm_up": warm_up,
            "flipout": flipout, "samples": samples, "initial_scale": initial_scale,
        },
        held_out_nll=held_out_nll,
    )  # fmt: skip
    gaussian = DiagonalGaussian(mean.detach(), (2 * log_scale.detach()).exp())
    warn_if_collapsed(gaussian, prior)
    return NetworkPosterior(
        model=module,
        likelihood=likelihood.at(_detached(free)),
        layout=layout,
        draws=gaussian.sample(draws, generator),
        center=gaussian.mean,
        shared=shared,
        gaussian=gaussian,
        prior=prior,
    )


def _example(data: Labelled | DataLoader) -> Tensor:
    if isinstance(data, DataLoader):
        with torch.random.fork_rng(devices=[]):
            return next(iter(data))[0][:1]
    return data.x[:1]


def _detached(free: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.detach() for n, t in free.items()}
