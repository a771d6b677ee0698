"""fDBD: how near features are to the decision boundaries, for their distance from the training mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dapcal.data import Data
from dapcal.detectors.activations import BATCH, Activations, Classifier, training_of
from dapcal.distances.covariance import BLOCK


def fit(network: nn.Module, train: Data, *, batch_size: int = BATCH) -> FDBD:
    """−mean_{c ≠ ŷ} (|f_ŷ − f_c| / ‖w_ŷ − w_c‖) / ‖z − μ‖ with the predicted class ŷ and the mean training feature μ.

    The fraction is the distance of z to the plane between the classes ŷ and c; classes with the same weights have
    none, and do not count.
    Liu, Qin (2024), arXiv:2312.11536.

    Args:
        network: a trained classifier that ends in a linear layer.
        train: what it was trained on (labels are not used).
        batch_size: inputs per forward pass.
    """
    classifier, activations, _ = training_of(network, train, batch_size)
    features, weight = activations.features, classifier.head(activations).weight
    gaps = torch.cdist(weight, weight, compute_mode="donot_use_mm_for_euclid_dist")
    if not (gaps > 0).any(1).all():
        raise ValueError("Expected classes with different weights in the last layer, got the same for all; train it")
    blocks = features.split(BLOCK)
    center = torch.stack([block.double().sum(0) for block in blocks]).sum(0) / len(features)
    lengths = torch.cat([(block.double() - center).norm(dim=1) for block in blocks])
    least = 1e-6 * float(lengths.mean()) or 1.0  # at the very mean the score would be −inf
    return FDBD(classifier, gaps, center, least)


@dataclass(frozen=True, eq=False)
class FDBD:
    """−mean_c (f_ŷ − f_c)/‖w_ŷ − w_c‖ / ‖z − μ‖."""

    classifier: Classifier
    gaps: Tensor  # ‖w_a − w_c‖, (K, K)
    center: Tensor  # μ, (P,)
    least: float  # smallest ‖z − μ‖ that counts

    def __call__(self, x: Tensor) -> Tensor:
        """Scores (N,)."""
        return self.classifier.map(self._score, x)

    def _score(self, activations: Activations) -> Tensor:
        logits = activations.logits.double()
        top, predicted = logits.max(1)
        gaps = self.gaps[predicted]  # (N, K)
        counted = gaps > 0  # leaves out ŷ itself
        distances = torch.where(counted, (top[:, None] - logits) / gaps.where(counted, 1.0), 0.0)
        mean = distances.sum(1) / counted.sum(1)
        return -mean / (activations.features.double() - self.center).norm(dim=1).clamp_min(self.least)
