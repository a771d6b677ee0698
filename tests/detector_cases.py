"""Classifiers and data that the tests of detectors share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CENTERS = torch.tensor([[2.0, 0.0], [-1.0, 1.7], [-1.0, -1.7]])


def blobs(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three clusters in the plane, and their labels."""
    y = torch.arange(n) % 3
    return CENTERS[y] + 0.5 * torch.randn(n, 2, generator=torch.Generator().manual_seed(seed)), y


def images(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Stripes of three widths with noise, (n, 1, 8, 8)."""
    y = torch.arange(n) % 3
    phase = (y + 1.0)[:, None] * torch.arange(8)
    noise = torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return torch.sin(phase)[:, None, None, :] + 0.4 * noise, y


def mlp(hidden: int = 12, classes: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, classes)
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 10, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(10, 3),
    )  # fmt: skip


def trained(network: nn.Module, x: Tensor, y: Tensor, steps: int = 60) -> nn.Module:
    """In training mode still, with parameters that require gradients: what detectors must leave alone."""
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    return network.train()


def seen(network: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Features and logits of a sequential network, in float64, by running its parts."""
    network = network.eval()
    with torch.no_grad():
        features = network[:-1](x)
        logits = network[-1](features)
    network.train()
    return features.double(), logits.double()
