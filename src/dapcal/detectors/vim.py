"""ViM: what of a feature vector lies outside the training features' principal space, against the logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dapcal.data import Data
from dapcal.detectors.activations import BATCH, Activations, Classifier, training_of
from dapcal.distances.covariance import BLOCK


def fit(network: nn.Module, train: Data, *, dimension: int | None = None, batch_size: int = BATCH) -> ViM:
    """α ‖Rᵀ(z − o)‖ − log Σ_k exp f_k: the log-odds of a virtual class whose logit is a scaled residual.

    The origin o = −W⁺ b is where all logits are equal to zero (as nearly as can be), R spans what is left of the
    features z − o beside their D principal directions, and α makes the mean virtual logit of the training inputs equal
    to their mean largest logit. The paper's score is the virtual class's probability, the sigmoid of this one.
    Wang, Li, Feng, Zhang (2022), arXiv:2203.10807.

    Args:
        network: a trained classifier that ends in a linear layer.
        train: what it was trained on (labels are not used).
        dimension: D; by default 1000 from 2048 features on, 512 from 768 on, else half of their number.
        batch_size: inputs per forward pass.
    """
    classifier, activations, _ = training_of(network, train, batch_size)
    head = classifier.head(activations)
    features, p = activations.features, head.weight.shape[1]
    dimension = _default_dimension(p) if dimension is None else dimension
    if not 0 <= dimension < p:
        raise ValueError(f"Expected `dimension` between 0 and {p - 1} (one less than features), got {dimension}")
    origin = -torch.linalg.pinv(head.weight) @ head.bias
    moment = head.weight.new_zeros(p, p)
    for block in features.split(BLOCK):
        moment += (block.double() - origin).T @ (block.double() - origin)
    residual = torch.linalg.eigh(moment).eigenvectors[:, : p - dimension]  # eigenvalues ascend
    lengths = torch.cat([((block.double() - origin) @ residual).norm(dim=1) for block in features.split(BLOCK)])
    roundoff = torch.finfo(features.dtype).eps * float(features.abs().max()) * p**0.5
    if not lengths.mean() > roundoff:
        raise ValueError(
            f"Expected training features outside of their {dimension} principal directions, got none: nothing is left "
            "to compare a residual with; pass a smaller `dimension`"
        )
    scale = float(activations.logits.double().max(1).values.mean() / lengths.mean())
    return ViM(classifier, origin, residual, scale)


@dataclass(frozen=True, eq=False)
class ViM:
    """α ‖Rᵀ(z − o)‖ − log Σ_k exp f_k."""

    classifier: Classifier
    origin: Tensor  # o, (P,)
    residual: Tensor  # R, (P, P − D)
    scale: float  # α

    def __call__(self, x: Tensor) -> Tensor:
        """Scores (N,)."""
        return self.classifier.map(self._score, x)

    def _score(self, activations: Activations) -> Tensor:
        virtual = self.scale * ((activations.features.double() - self.origin) @ self.residual).norm(dim=1)
        return virtual - torch.logsumexp(activations.logits.double(), 1)


def _default_dimension(features: int) -> int:
    if features >= 2048:
        return 1000
    return 512 if features >= 768 else features // 2
