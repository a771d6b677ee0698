"""Distance of features to their k-th nearest neighbour among the training features."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import normalize

from dapcal.data import Data
from dapcal.detectors.activations import BATCH, Activations, Classifier, training_of
from dapcal.distances.neighbors import TorchIndex


def fit(network: nn.Module, train: Data, *, k: int = 50, unit: bool = True, batch_size: int = BATCH) -> KNN:
    """‖z − z_(k)‖ between feature vectors, by default of unit length (Sun, Ming, Zhu, Li 2022, arXiv:2204.06507).

    Args:
        network: a trained classifier.
        train: what it was trained on (labels are not used).
        k: which neighbour.
        unit: divide each feature vector by its length, as the paper does.
        batch_size: inputs per forward pass.
    """
    classifier, (features, _), _ = training_of(network, train, batch_size)
    check_neighbours(k, len(features))
    return KNN(classifier, TorchIndex(normalize(features) if unit else features), k, unit)


@dataclass(frozen=True, eq=False)
class KNN:
    """‖z − z_(k)‖."""

    classifier: Classifier
    index: TorchIndex
    k: int
    unit: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Scores (N,)."""
        return self.classifier.map(self._score, x)

    def _score(self, activations: Activations) -> Tensor:
        features = normalize(activations.features) if self.unit else activations.features
        return self.index.query(features, self.k)[0][:, -1]


def check_neighbours(k: int, number: int) -> None:
    """There are k neighbours among `number` training inputs."""
    if not 1 <= k <= number:
        raise ValueError(f"Expected `k` between 1 and {number} (training inputs), got {k}; pass another `k`")
