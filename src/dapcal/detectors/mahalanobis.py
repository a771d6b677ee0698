"""Mahalanobis distance of features to the nearest class mean, under one covariance for all classes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import normalize

from dapcal.data import Data
from dapcal.detectors.activations import BATCH, Activations, Classifier, training_of
from dapcal.distances.covariance import cholesky, class_means, shrunk_covariance, squared_distances


def fit(
    network: nn.Module,
    train: Data,
    *,
    unit: bool = False,
    shrinkage: float | None = None,
    batch_size: int = BATCH,
) -> Mahalanobis:
    """min_k (z − μ_k)ᵀ Σ⁻¹ (z − μ_k) with the class means and the common covariance of the training features.

    Lee, Lee, Lee, Shin (2018), arXiv:1807.03888, at the last layer, without their input perturbation and combination
    of layers. With `unit` it is Mahalanobis++ (Müller, Hein 2025, arXiv:2505.18032).

    Args:
        network: a trained classifier.
        train: what it was trained on.
        unit: divide each feature vector by its length.
        shrinkage: of Σ towards a multiple of I, see `covariance.shrunk_covariance`; by default Ledoit-Wolf, 0 is the
            papers'.
        batch_size: inputs per forward pass.
    """
    training = training_of(network, train, batch_size)
    features = normalize(training.activations.features) if unit else training.activations.features
    means, _, members = class_means(features, training.labels())
    factor = cholesky(shrunk_covariance(features, means, members, shrinkage))
    return Mahalanobis(training.classifier, means, factor, unit)


@dataclass(frozen=True, eq=False)
class Mahalanobis:
    """min_k (z − μ_k)ᵀ (L Lᵀ)⁻¹ (z − μ_k)."""

    classifier: Classifier
    means: Tensor  # (C, P)
    factor: Tensor  # (P, P)
    unit: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Scores (N,)."""
        return self.classifier.map(self._score, x)

    def _score(self, activations: Activations) -> Tensor:
        features = normalize(activations.features) if self.unit else activations.features
        return squared_distances(features, self.means, self.factor).min(1).values
