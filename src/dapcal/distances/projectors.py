"""x -> z: the spaces in which distances are measured.

Recipes (`Features`, `RandomFourier`, `Vae`) are fitted to the training inputs and return a projector. Any callable
from inputs (N, ...) to points (N, P) is a projector already.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dapcal.distances.features import Features, LayerFeatures, MemberFeatures
from dapcal.distances.spread import projected
from dapcal.mapped import finite_rows, is_mapped, joined, largest_like
from dapcal.storing import Stores
from dapcal.types import Posterior, Projector

__all__ = [
    "Features", "FourierFeatures", "Identity", "LayerFeatures", "MemberFeatures", "ProjectorRecipe", "RandomFourier",
    "Vae", "VaeEncoder", "fitted", "median_distance", "project",
]  # fmt: skip


@runtime_checkable
class ProjectorRecipe(Protocol):
    """Something that is fitted to training inputs and a posterior before it can project."""

    def fit_projector(self, train: Tensor, posterior: Posterior) -> Projector:
        """The fitted projector."""
        ...


def fitted(projector: Projector | ProjectorRecipe, train: Tensor, posterior: Posterior) -> Projector:
    """A projector as it is, or a recipe fitted."""
    if isinstance(projector, ProjectorRecipe):
        return projector.fit_projector(train, posterior)
    return projector


def project(projector: Projector, x: Tensor, batch_size: int = 512) -> Tensor:
    """Points (N, P) of a batch of inputs, checked, without gradients; of training inputs maybe on several machines."""
    if not isinstance(projector, Identity) and (elsewhere := projected(project, projector, x)) is not None:
        return elsewhere
    with torch.no_grad():
        # features come in batches of their own, so that all who ask for them share a pass over x; inputs in a file of
        # ours need no copy
        whole = isinstance(projector, LayerFeatures | MemberFeatures) or (
            isinstance(projector, Identity) and x.is_floating_point() and is_mapped(x)
        )
        z = projector(x) if whole else joined(map(projector, x.split(batch_size)), largest_like(x))
    if z.ndim != 2 or len(z) != len(x):
        raise ValueError(
            f"Expected the projector to return ({len(x)}, P) for {len(x)} inputs, got {tuple(z.shape)}; flatten it"
        )
    if not z.is_floating_point():
        raise ValueError(f"Expected the projector to return floating-point numbers, got {z.dtype}")
    if not (finite := finite_rows(z)).all():
        raise ValueError(
            f"The projector returned NaN or inf for {int((~finite).sum())} of {len(x)} inputs; check it on those inputs"
        )
    return z


@dataclass(frozen=True)
class Identity:
    """The inputs themselves, flattened."""

    stores = Stores()

    def __call__(self, x: Tensor) -> Tensor:
        """Z = x."""
        return x.flatten(1).to(torch.get_default_dtype()) if not x.is_floating_point() else x.flatten(1)


@dataclass(frozen=True)
class RandomFourier:
    """Recipe: random Fourier features of a Gaussian kernel (random kitchen sinks, Rahimi and Recht 2007).

    Args:
        dimension: number of features.
        length_scale: of the kernel; by default the median distance between training inputs.
        seed: of the frequencies.
    """

    dimension: int = 256
    length_scale: float | None = None
    seed: int = 0

    def fit_projector(self, train: Tensor, posterior: Posterior) -> FourierFeatures:  # noqa: ARG002
        """Draw the frequencies."""
        x = Identity()(train)
        generator = torch.Generator().manual_seed(self.seed)
        length = self.length_scale if self.length_scale is not None else median_distance(x, generator)
        frequencies = torch.randn(x.shape[1], self.dimension, generator=generator) / length
        phases = 2 * math.pi * torch.rand(self.dimension, generator=generator)
        return FourierFeatures(frequencies.to(x), phases.to(x))


@dataclass(frozen=True, eq=False)
class FourierFeatures:
    """z = √(2/D) cos(Wᵀx + b): inner products approximate exp(−‖x − x'‖²/(2ℓ²))."""

    stores = Stores()

    frequencies: Tensor  # (P, D)
    phases: Tensor  # (D,)

    def __call__(self, x: Tensor) -> Tensor:
        """Features (N, D)."""
        x = Identity()(x).to(self.frequencies)
        return math.sqrt(2 / len(self.phases)) * torch.cos(x @ self.frequencies + self.phases)


@dataclass(frozen=True)
class Vae:
    """Recipe: the mean of a small variational autoencoder's encoder, trained on the inputs (Kingma, Welling 2013).

    Inputs are standardised; encoder and decoder have one hidden layer.

    Args:
        dimension: of the latent space.
        hidden: width of the hidden layers.
        epochs: passes over the training inputs.
        learning_rate: Adam's.
        seed: of weights, batches and noise.
    """

    dimension: int = 8
    hidden: int = 128
    epochs: int = 50
    learning_rate: float = 2e-3
    seed: int = 0

    def fit_projector(self, train: Tensor, posterior: Posterior) -> VaeEncoder:  # noqa: ARG002
        """Train by the evidence lower bound with a unit-variance Gaussian decoder."""
        with torch.inference_mode(False):
            return self._train(train.clone())

    def _train(self, train: Tensor) -> VaeEncoder:
        x = Identity()(train)
        center, scale = x.mean(0), x.std(0, correction=0).clamp_min(1e-6)
        x = (x - center) / scale
        generator = torch.Generator().manual_seed(self.seed)

        def layer(rows: int, columns: int) -> list[Tensor]:
            weight = torch.randn(rows, columns, generator=generator) / math.sqrt(rows)
            return [weight.to(x).requires_grad_(), torch.zeros(columns).to(x).requires_grad_()]

        encoder = layer(x.shape[1], self.hidden) + layer(self.hidden, 2 * self.dimension)
        decoder = layer(self.dimension, self.hidden) + layer(self.hidden, x.shape[1])
        optimizer = torch.optim.Adam([*encoder, *decoder], lr=self.learning_rate)
        with torch.enable_grad():
            for _ in range(self.epochs):
                for index in torch.randperm(len(x), generator=generator).split(256):
                    mean, log_scale = _two_layers(x[index], encoder).chunk(2, -1)
                    noise = torch.randn(mean.shape, generator=generator).to(x)
                    latent = mean + log_scale.exp() * noise
                    error = ((_two_layers(latent, decoder) - x[index]) ** 2).sum(1)
                    kl = (0.5 * (mean**2 + (2 * log_scale).exp() - 1) - log_scale).sum(1)
                    loss = (0.5 * error + kl).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
        w1, b1, w2, b2 = (t.detach() for t in encoder)
        return VaeEncoder(center, scale, (w1, b1, w2[:, : self.dimension], b2[: self.dimension]))


@dataclass(frozen=True, eq=False)
class VaeEncoder:
    """The encoder's mean."""

    stores = Stores()

    center: Tensor
    scale: Tensor
    weights: tuple[Tensor, Tensor, Tensor, Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """Latent means (N, dimension)."""
        return _two_layers((Identity()(x).to(self.center) - self.center) / self.scale, list(self.weights))


def _two_layers(x: Tensor, weights: list[Tensor]) -> Tensor:
    w1, b1, w2, b2 = weights
    return torch.tanh(x @ w1 + b1) @ w2 + b2


def median_distance(points: Tensor, generator: torch.Generator, pairs: int = 4096) -> float:
    """Median distance between random pairs of distinct points: the usual length scale of a kernel."""
    one, two = torch.randint(len(points), (2, pairs), generator=generator)
    distances = (points[one] - points[two]).norm(dim=1)
    positive = distances[distances > 0]
    if not len(positive):
        raise ValueError("All training points are identical; a length scale cannot be found, give one")
    return float(positive.median())
