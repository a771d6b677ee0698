"""VOGN: mean-field variational inference by natural gradients, whose curvature is the mean of squared gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.optim import SGD

from dapcal.data import Data, in_memory, size
from dapcal.gaussians import DiagonalGaussian
from dapcal.likelihoods import Likelihood
from dapcal.networks import (
    MEMORY,
    any_inputs,
    as_tensor,
    backward_in_evaluation,
    evaluate,
    frozen_copy,
    layout_of,
    one_column,
    split_state,
    vectorising,
)
from dapcal.posteriors._training import checkpoints
from dapcal.posteriors._training.checks import check
from dapcal.posteriors._training.mean_field import divergence, fixed_draws, mixture_nll, warn_if_collapsed
from dapcal.posteriors._training.trainer import run
from dapcal.posteriors.network import NetworkPosterior
from dapcal.posteriors.training import Options, Training, schedule_of
from dapcal.prior import Aware, make_prior


@any_inputs
def fit(
    model: nn.Module,
    likelihood: Likelihood,
    train: Data,
    *,
    prior_scale: float | Mapping[str, float] = 1.0,
    kl_weight: float = 1.0,
    damping: float = 1e-3,
    momentum: float = 0.9,
    curvature_rate: float = 0.05,
    samples: int = 1,
    initial_scale: float = 0.02,
    draws: int = 50,
    seed: int = 0,
    aware: Aware = "*",
    **options: Unpack[Options],
) -> NetworkPosterior:
    """q(θ) = N(μ, diag τ/(N (h + δ))), by natural-gradient steps on Σ_n E_q[−log p(y_n | θ, x_n)] + τ KL(q ‖ prior).

    With δ = τ/(N σ0²), and g_i the gradient of −log p(y_i | θ, x_i) at θ ~ q for each input of a minibatch:

        m ← β1 m + (1 − β1) (mean g_i + δ μ),   h ← (1 − β2) h + β2 mean g_i²,   μ ← μ − η m / (h + δ + γ),

    where m and h enter divided by 1 − β1^t and 1 − (1 − β2)^t, as in Adam; σ is `initial_scale` for the first step.
    This is algorithm 1 of Osawa et al. (2019), arXiv:1906.02506, with three differences: m is an average (there a sum,
    so that the same η steps 1/(1 − β1) times as far); for τ other than 1 the fixed point is that of this objective; and
    damping γ holds back the steps alone, it does not narrow the posterior. At the fixed point the precision is
    Σ_n E_q[g_n²]/τ + 1/σ0²: squared gradients (the empirical Fisher) stand for the Hessian, so σ differs from that of
    `variational.fit`, which does without this approximation.

    The mean starts at the model's weights, so pass a trained model (`dapcal.posteriors.map.fit(...).network`). The
    network runs in evaluation mode: batch-norm statistics stay as they are, dropout is off. The likelihood is held as
    given: fit its noise level first (`dapcal.posteriors.map.fit(...).likelihood`). A step costs as much memory as the
    gradients of some inputs take, and more time than one of `variational.fit`.

    Args:
        model: the trained network.
        likelihood: p(y | outputs).
        train: (inputs, targets), a Dataset or a DataLoader.
        prior_scale: σ0, one or by name pattern.
        kl_weight: τ; under 1 it tempers the posterior.
        damping: γ, added to the curvature in steps.
        momentum: β1.
        curvature_rate: β2.
        samples: draws of θ for each step.
        initial_scale: σ at the first step.
        draws: S, fixed draws that predictions use.
        seed: of batches, gradients and draws.
        aware: parameters that a distance may widen, see `dapcal.prior.make_prior`.
        options: epochs, learning rate (η, 0.1 where none is given) and all else of
            `dapcal.posteriors.training.Training`, but `optimizer`.
    """
    if not kl_weight > 0 or not damping >= 0 or not initial_scale > 0 or draws < 1 or samples < 1:
        raise ValueError(
            "Expected `kl_weight` and `initial_scale` > 0, `damping` >= 0, `draws` and `samples` >= 1, got "
            f"{kl_weight}, {initial_scale}, {damping}, {draws}, {samples}"
        )
    if not 0 <= momentum < 1 or not 0 < curvature_rate <= 1:
        raise ValueError(
            "Expected `momentum` at least 0 and under 1, `curvature_rate` over 0 and at most 1, got "
            f"{momentum} and {curvature_rate}"
        )
    if options.get("optimizer") is not None:
        raise ValueError("VOGN takes steps of its own, by natural gradients; leave out `optimizer`")
    check(model, likelihood)
    defaults: Options = {"learning_rate": 0.1}
    given: Options = {**defaults, **options}
    training = Training(**given)
    data = in_memory(train, "train")
    module = frozen_copy(model)
    random, shared = split_state(model)
    layout = layout_of(random)
    mean = layout.flatten(random)
    device, count = mean.device, size(data)
    prior = make_prior(layout.sizes, prior_scale, aware, device)
    sigma0 = prior.sigma0[prior.group].to(mean)
    delta = kl_weight / (count * sigma0**2)
    slope, curvature = torch.zeros_like(mean), torch.zeros_like(mean)
    counter = torch.zeros((), dtype=torch.long)

    def scale() -> Tensor:
        if int(counter) == 0:
            return torch.full_like(mean, initial_scale)
        return (count / kl_weight * (corrected() + delta)).rsqrt()

    def corrected() -> Tensor:
        return curvature / (1 - (1 - curvature_rate) ** int(counter))

    def forward(vector: Tensor, x: Tensor) -> Tensor:
        with training.autocast(device), backward_in_evaluation(module):
            outputs = functional_call(module, {**shared, **layout.unflatten(vector)}, (x,))
        return one_column(as_tensor(outputs)).to(mean.dtype)

    def nll(vector: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return -likelihood.log_likelihood(forward(vector, x[None]), y[None]).sum()

    optimizer = SGD([mean], float(training.learning_rate))
    schedule = schedule_of(training, optimizer, data)

    @torch.no_grad()
    def step(x: Tensor, y: Tensor) -> Tensor:
        x, sigma = x.to(device), scale()
        total = divergence(mean, sigma.log(), sigma0) * kl_weight / count
        first, second = torch.zeros_like(mean), torch.zeros_like(mean)
        for _ in range(samples):
            theta = mean + torch.randn_like(mean) * sigma
            outputs = forward(theta, x)
            targets = likelihood.check(outputs, y.to(device))
            total = total - likelihood.log_likelihood(outputs, targets).mean() / samples
            g, g2 = gradient_moments(nll, theta, x, targets)
            first, second = first + g / samples, second + g2 / samples
        slope.mul_(momentum).add_(first + delta * mean, alpha=1 - momentum)
        curvature.mul_(1 - curvature_rate).add_(second, alpha=curvature_rate)
        counter.add_(1)
        mean.grad = slope / (1 - momentum ** int(counter)) / (corrected() + delta + damping)
        optimizer.step()
        schedule.step()
        return total

    drawn = fixed_draws(mean, seed)

    def held_out_nll(x: Tensor, y: Tensor) -> Tensor:
        theta = drawn(mean, scale())
        return mixture_nll(evaluate(module, layout.unflatten(theta), shared, x), y, likelihood)

    generator = torch.Generator().manual_seed(seed)
    run(
        step,
        {"mean": mean, "slope": slope, "curvature": curvature, "step": counter},
        {"optimizer": optimizer, "schedule": schedule},
        data,
        training=training,
        generator=generator,
        method="VOGN",
        settings={
            "model": checkpoints.of_model(model), "prior_scale": prior_scale, "likelihood": likelihood,
            "kl_weight": kl_weight, "damping": damping,
            "momentum": momentum, "curvature_rate": curvature_rate, "samples": samples, "initial_scale": initial_scale,
        },
        held_out_nll=held_out_nll,
    )  # fmt: skip
    gaussian = DiagonalGaussian(mean.detach(), scale().square())
    warn_if_collapsed(gaussian, prior)
    return NetworkPosterior(
        model=module,
        likelihood=likelihood,
        layout=layout,
        draws=gaussian.sample(draws, generator),
        center=gaussian.mean,
        shared=shared,
        gaussian=gaussian,
        prior=prior,
    )


def gradient_moments(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor], vector: Tensor, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and mean square, (P,) each, of the gradients of `loss(vector, x_i, y_i)` over a minibatch.

    Inputs go through together (`vmap`), as many as `MEMORY` holds gradients of; a model that `vmap` cannot run goes
    through one by one.

    >>> mean, square = gradient_moments(lambda v, x, y: (v * x).sum(), torch.ones(1), torch.tensor([[1.0], [3.0]]),
    ...     torch.zeros(2))
    >>> mean.item(), square.item()
    (2.0, 5.0)
    """
    each, chunk = grad(loss), max(1, MEMORY // (4 * vector.numel() * vector.element_size()))
    try:
        with vectorising():
            return _moments(vmap(each, (None, 0, 0)), vector, x, y, chunk)
    except RuntimeError:  # control flow that looks at activations stops vmap
        return _moments(lambda v, a, b: each(v, a[0], b[0])[None], vector, x, y, 1)


def _moments(
    gradients: Callable[[Tensor, Tensor, Tensor], Tensor], vector: Tensor, x: Tensor, y: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    first, second = torch.zeros_like(vector), torch.zeros_like(vector)
    for part, targets in zip(x.split(chunk), y.split(chunk), strict=True):
        own = gradients(vector, part, targets)  # (chunk, P)
        first += own.sum(0)
        second += own.square().sum(0)
    return first / len(x), second / len(x)
