"""DUQ: a network whose classes are kernels around moving centroids, with a penalty on its sensitivity to inputs."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss, one_hot

from dapcal.data import Data, Labelled, gather, in_memory
from dapcal.distances.projectors import project
from dapcal.likelihoods import Categorical
from dapcal.networks import as_tensor, frozen_copy
from dapcal.posteriors._training import checkpoints
from dapcal.posteriors._training.checks import check_network
from dapcal.posteriors._training.log_joint import training_mode
from dapcal.posteriors._training.trainer import run
from dapcal.posteriors.training import Options, Training, schedule_of

BATCH = 512  # inputs per forward pass


def fit(
    body: nn.Module,
    classes: int,
    train: Data,
    *,
    embedding: int = 256,
    length_scale: float = 0.1,
    penalty: float = 0.05,
    decay: float = 0.999,
    seed: int = 0,
    **options: Unpack[Options],
) -> DUQ:
    """Train kernel values of the classes by binary cross-entropies and a two-sided gradient penalty.

    van Amersfoort et al. (2020), arXiv:2003.02037. K_c(x) = exp(−‖W_c h(x) − e_c‖²/(2 E σ²)), E the embedding's
    dimension; the loss is the mean cross-entropy of K_c against the label's indicator + λ (‖∇_x Σ_c K_c‖ − 1)². After
    every step the centroids follow, e_c = m_c/n_c with m_c ← γ m_c + (1 − γ) Σ_{i in c} W_c h(x_i), and n_c ← γ n_c +
    (1 − γ) · number of class c in the minibatch. Defaults are the paper's for Fashion-MNIST.

    Args:
        body: from inputs to features (N, P), which are flattened; left as it is.
        classes: K.
        train: (inputs, labels), a Dataset or a DataLoader.
        embedding: E.
        length_scale: σ.
        penalty: λ; 0 for none.
        decay: γ.
        seed: of W, first centroids, batches and dropout.
        options: epochs, learning rate and all else of `dapcal.posteriors.training.Training`.
    """
    check_network(body)
    if classes < 2 or embedding < 1:
        raise ValueError(f"Expected `classes` >= 2 and `embedding` >= 1, got {classes} and {embedding}")
    if not length_scale > 0 or not penalty >= 0 or not 0 <= decay < 1:
        raise ValueError(
            "Expected `length_scale` > 0, `penalty` >= 0 and 0 <= `decay` < 1, got "
            f"{length_scale}, {penalty} and {decay}"
        )
    training = Training(**options)
    data = in_memory(train, "train")
    example = (data if isinstance(data, Labelled) else gather(data, "train")).x[:1]
    if penalty > 0 and not example.is_floating_point():
        raise ValueError(f"Expected floating-point inputs for a gradient penalty, got {example.dtype}; use penalty=0")
    generator = torch.Generator().manual_seed(seed)
    network = _network(copy.deepcopy(body), example, classes, embedding, length_scale, training.batch_size, generator)
    device = network.weight.device
    parameters: list[Tensor] = [p for p in network.parameters() if p.requires_grad]
    optimizer = training.optimizer(parameters, float(training.learning_rate))
    schedule = schedule_of(training, optimizer, data)

    def step(x: Tensor, y: Tensor) -> Tensor:
        x = x.to(device).detach().requires_grad_(penalty > 0)
        with training.autocast(device):
            features = network.features(x)
        log_kernel = network.log_kernel(features)
        y = Categorical().check(log_kernel, y.to(device))
        loss = cross_entropies(log_kernel, y).mean()
        if penalty > 0:
            loss = loss + penalty * gradient_penalty(log_kernel.exp(), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        network.eval()
        with torch.no_grad(), training.autocast(device):
            features = network.features(x)  # anew: the centroids follow the weights that stepped
        network.follow(features, y, decay)
        training_mode(network)
        return loss.detach()

    def held_out_nll(x: Tensor, y: Tensor) -> Tensor:
        network.eval()
        log_kernel = network(x)
        training_mode(network)
        return nll_loss(log_kernel.log_softmax(1), Categorical().check(log_kernel, y.to(device)))

    run(
        step,
        dict([*network.named_parameters(), *network.named_buffers()]),
        {"optimizer": optimizer, "schedule": schedule},
        data,
        training=training,
        generator=generator,
        method="DUQ",
        settings={
            "body": checkpoints.of_model(body, start=False), "length_scale": length_scale, "penalty": penalty,
            "decay": decay,
        },
        held_out_nll=held_out_nll,
    )  # fmt: skip
    return DUQ(network.eval().requires_grad_(False))


@dataclass(frozen=True, eq=False)
class DUQ:
    """Kernel values around centroids as class probabilities and as a score.

    Attributes:
        network: from inputs to log K_c, (N, K).
    """

    network: _Network

    def __call__(self, x: Tensor) -> Tensor:
        """−max_c log K_c, (N,): orders inputs as −max_c K_c does, and still where all K_c underflow."""
        return -self.log_kernel(x).max(1).values

    def probs(self, x: Tensor) -> Tensor:
        """K_c/Σ K, (N, K)."""
        return self.log_kernel(x).softmax(1)

    def log_kernel(self, x: Tensor) -> Tensor:
        """log K_c, (N, K)."""
        return project(self.network, x, BATCH)


def cross_entropies(log_kernel: Tensor, y: Tensor) -> Tensor:
    """−log K_c of the label's class and −log(1 − K_c) of the others, (N, K).

    From log K, since K underflows far from the centroids, where `torch.nn.functional.binary_cross_entropy` then has
    no gradient.
    """
    tiny = torch.finfo(log_kernel.dtype).tiny
    others = (-torch.expm1(log_kernel)).clamp_min(tiny).log()
    return -torch.where(one_hot(y, log_kernel.shape[1]).bool(), log_kernel, others)


def gradient_penalty(kernel: Tensor, x: Tensor) -> Tensor:
    """Mean over inputs of (‖∇_x Σ_c K_c‖ − 1)², differentiable; x must require a gradient."""
    (gradient,) = torch.autograd.grad(kernel.sum(), x, create_graph=True)
    return ((gradient.flatten(1).norm(dim=1) - 1) ** 2).mean()


class _Network(nn.Module):
    """From inputs to log K_c."""

    sums: Tensor  # m, (E, K)
    counts: Tensor  # n, (K,)

    def __init__(self, body: nn.Module, weight: Tensor, centroids: Tensor, count: float, length_scale: float) -> None:
        super().__init__()
        self.body, self.weight, self.length_scale = body, nn.Parameter(weight), length_scale
        self.register_buffer("sums", centroids * count)
        self.register_buffer("counts", centroids.new_full(centroids.shape[1:], count))

    def features(self, x: Tensor) -> Tensor:
        """What the body says, (N, P)."""
        return as_tensor(self.body(x.to(self.weight.device))).flatten(1)

    def embed(self, features: Tensor) -> Tensor:
        """W_c h, (N, E, K)."""
        return torch.einsum("np,ekp->nek", features.to(self.weight), self.weight)

    def log_kernel(self, features: Tensor) -> Tensor:
        """log K_c, (N, K)."""
        difference = self.embed(features) - self.sums / self.counts
        return -(difference**2).mean(1) / (2 * self.length_scale**2)

    @torch.no_grad()
    def follow(self, features: Tensor, y: Tensor, decay: float) -> None:
        """Move the centroids towards a minibatch."""
        labels = one_hot(y, len(self.counts)).to(self.sums)  # (N, K)
        self.counts.lerp_(labels.sum(0), 1 - decay)
        self.sums.lerp_(torch.einsum("nek,nk->ek", self.embed(features), labels), 1 - decay)

    def forward(self, x: Tensor) -> Tensor:
        return self.log_kernel(self.features(x))


def _network(
    body: nn.Module,
    example: Tensor,
    classes: int,
    embedding: int,
    length_scale: float,
    batch_size: int,
    generator: torch.Generator,
) -> _Network:
    """What training starts from: W ~ N(0, 0.05²) and centroids ~ N(0, I), as in the authors' code."""
    probe = frozen_copy(body)
    device = next((p.device for p in probe.parameters()), example.device)
    features = project(lambda batch: as_tensor(probe(batch.to(device))).flatten(1), example)
    weight = 0.05 * torch.randn(embedding, classes, features.shape[1], generator=generator)
    centroids = torch.randn(embedding, classes, generator=generator)
    network = _Network(body, weight.to(features), centroids.to(features), batch_size / classes, length_scale)
    training_mode(network)
    return network
