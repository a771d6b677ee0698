"""DDU: the density of features under one Gaussian per class."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from dapcal.data import Data
from dapcal.detectors.activations import BATCH, Activations, Classifier, training_of
from dapcal.distances.covariance import cholesky, class_means, shrunk_covariance, squared_distances

LOG_TWO_PI = math.log(2 * math.pi)


def fit(
    network: nn.Module, train: Data, *, unit: bool = False, shrinkage: float | None = None, batch_size: int = BATCH
) -> DDU:
    """−log Σ_k π_k N(z; μ_k, Σ_k) with the share, mean and covariance of each class's training features.

    Mukhoti, Kirsch, van Amersfoort, Torr, Gal (2021), arXiv:2102.11582, who train the network with spectral
    normalisation, and add jitter to sample covariances until they factor (`shrinkage` = 0). A class whose features do
    not vary (a single input) has the covariance of all classes about their means.

    Args:
        network: a trained classifier.
        train: what it was trained on.
        unit: divide each feature vector by its length.
        shrinkage: of the covariances towards a multiple of I, see `covariance.shrunk_covariance`; by default
            Ledoit-Wolf.
        batch_size: inputs per forward pass.
    """
    training = training_of(network, train, batch_size)
    features = normalize(training.activations.features) if unit else training.activations.features
    means, counts, members = class_means(features, training.labels())
    tied = shrunk_covariance(features, means, members, shrinkage)
    factors = torch.empty(len(means), *tied.shape, dtype=tied.dtype, device=tied.device)
    for k, mean in enumerate(means):
        own = features[members == k]
        covariance = shrunk_covariance(own, mean[None], torch.zeros_like(members[: len(own)]), shrinkage)
        factors[k] = cholesky(covariance if covariance.trace() > 0 else tied)
    return DDU(training.classifier, means, factors, (counts / counts.sum()).double().log(), unit)


@dataclass(frozen=True, eq=False)
class DDU:
    """−log Σ_k π_k N(z; μ_k, L_k L_kᵀ)."""

    classifier: Classifier
    means: Tensor  # (C, P)
    factors: Tensor  # (C, P, P)
    log_shares: Tensor  # (C,)
    unit: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Scores (N,)."""
        return self.classifier.map(self._score, x)

    def _score(self, activations: Activations) -> Tensor:
        volumes = self.factors.diagonal(dim1=1, dim2=2).log().sum(1) + self.means.shape[1] / 2 * LOG_TWO_PI  # (C,)
        features = normalize(activations.features) if self.unit else activations.features
        pairs = zip(self.means, self.factors, strict=True)
        squared = [squared_distances(features, mean[None], factor) for mean, factor in pairs]
        return -torch.logsumexp(self.log_shares - volumes - torch.cat(squared, 1) / 2, 1)
