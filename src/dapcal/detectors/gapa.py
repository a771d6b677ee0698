"""GAPA: Gaussian processes as activations, whose mean is the network's and whose variance grows off the data."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dapcal.data import Data, check_inputs, gather
from dapcal.detectors.activations import BATCH, Activations, Classifier, batchwise, classifier_of
from dapcal.detectors.knn import check_neighbours
from dapcal.detectors.layers import outputs_of, weight_layers
from dapcal.detectors.logits import entropy_of
from dapcal.distances.neighbors import TorchIndex
from dapcal.distances.projectors import median_distance

NOISE = 1e-6  # on the kernel's diagonal of ones: duplicates do not stop a Cholesky factor


def fit(
    network: nn.Module,
    train: Data,
    *,
    k: int = 50,
    length_scale: float | None = None,
    seed: int = 0,
    batch_size: int = BATCH,
) -> GAPA:
    """softmax_c(f_c / √(1 + π/8 v_c)) with the logits' variances v_c = Σ_j W_cj² σ_j² r(x).

    r(x) = 1 − k_xᵀ (K + 1e-6 I)⁻¹ k_x is the posterior variance of a Gaussian process of unit variance with kernel
    exp(−‖a − a'‖²/(2ℓ²)), conditioned on the k training activations nearest to a(x).

    Published (Bergna, Depeweg, Calvo-Ordoñez, Plenk, Cartea, Hernández-Lobato 2026, arXiv:2602.14934; 2025,
    arXiv:2502.20966): activations as Gaussian processes whose mean is the original activation, conditioned on the
    nearest of the cached training activations, and the variance carried to the outputs without sampling. Ours: it sits
    at the last hidden layer alone; all training inputs are kept, and none are learnt; ℓ is the median distance and σ_j²
    the training variance of feature j; a are the pre-activations where one linear layer gives as many as there are
    features, else the features; probabilities by MacKay's approximation (1992), class by class.

    The variance is bounded, so far away it does not outgrow the logits of a network of ReLUs.

    Args:
        network: a trained classifier that ends in a linear layer.
        train: what it was trained on (labels are not used).
        k: training activations that the variance is conditioned on.
        length_scale: ℓ; by default the median distance between training activations.
        seed: of the pairs that the median is taken over.
        batch_size: inputs per forward pass.
    """
    x = gather(train, "train").x
    check_neighbours(k, len(x))
    classifier = classifier_of(network, x, batch_size)
    layer = _pre_activations(classifier, x)
    with torch.no_grad():
        parts = [_run(classifier, layer, batch) for batch in check_inputs(x, "train").split(batch_size)]
    points = torch.cat([place for _, place in parts])
    activations = Activations(*(torch.cat(column) for column in zip(*(seen for seen, _ in parts), strict=True)))
    weight = classifier.head(activations).weight
    variance = weight**2 @ activations.features.double().var(0, correction=0)
    length = length_scale
    if length is None:
        length = median_distance(points, torch.Generator().manual_seed(seed))
    if not length > 0:
        raise ValueError(f"Expected `length_scale` > 0, got {length}")
    return GAPA(classifier, layer, TorchIndex(points), variance, length, k)


@dataclass(frozen=True, eq=False)
class GAPA:
    """Entropy of softmax(f / √(1 + π/8 v)).

    Attributes:
        classifier: gives features and logits.
        layer: whose outputs the kernel compares; None for the features.
        index: of the training activations.
        variance: of the logits far from all data, Σ_j W_cj² σ_j², (K,).
        length_scale: ℓ.
        k: training activations that the variance is conditioned on.
    """

    classifier: Classifier
    layer: str | None
    index: TorchIndex
    variance: Tensor
    length_scale: float
    k: int

    def __call__(self, x: Tensor) -> Tensor:
        """Scores (N,)."""
        return batchwise(lambda batch: entropy_of(self._scaled(batch)), x, self.classifier.batch_size)

    def probs(self, x: Tensor) -> Tensor:
        """Class probabilities (N, K)."""
        return batchwise(lambda batch: self._scaled(batch).softmax(-1), x, self.classifier.batch_size)

    def logit_variance(self, x: Tensor) -> Tensor:
        """v, (N, K)."""

        def variance(batch: Tensor) -> Tensor:
            return self._left(_run(self.classifier, self.layer, batch)[1])[:, None] * self.variance

        return batchwise(variance, x, self.classifier.batch_size)

    def _scaled(self, batch: Tensor) -> Tensor:
        activations, points = _run(self.classifier, self.layer, batch)
        variance = self._left(points)[:, None] * self.variance
        return activations.logits.double() / (1 + math.pi / 8 * variance).sqrt()

    def _left(self, points: Tensor) -> Tensor:
        """r: the share of the prior variance that is left, (N,)."""
        rows = max(1, self.index.memory // (4 * 8 * self.k * (points.shape[1] + self.k)))  # a few float64 copies
        return torch.cat([self._left_block(block) for block in points.split(rows)])

    def _left_block(self, points: Tensor) -> Tensor:
        distances, nearest = self.index.query(points, self.k)
        inducing = self.index.points[nearest].double()  # (N, k, P)
        inducing = inducing - inducing[:, :1]  # distances of neighbours keep their digits far from the origin
        gram = self._kernel(torch.cdist(inducing, inducing))
        gram.diagonal(dim1=1, dim2=2).add_(NOISE)
        cross = self._kernel(distances.double())[..., None]  # (N, k, 1)
        half = torch.linalg.solve_triangular(torch.linalg.cholesky(gram), cross, upper=False)
        return (1 - half.square().sum((1, 2))).clamp(0, 1)

    def _kernel(self, distances: Tensor) -> Tensor:
        return torch.exp(-((distances / self.length_scale) ** 2) / 2)


def _pre_activations(classifier: Classifier, x: Tensor) -> str | None:
    """The linear layer that runs last before the head, if it gives as many numbers as there are features."""
    order = weight_layers(classifier.network, x[:1])
    if classifier.layer not in order or order.index(classifier.layer) == 0:
        return None
    before = order[order.index(classifier.layer) - 1]
    layers = (classifier.network.get_submodule(name) for name in (before, classifier.layer))
    widths = [(m.in_features, m.out_features) if isinstance(m, nn.Linear) else None for m in layers]
    return before if widths[0] and widths[1] and widths[0][1] == widths[1][0] else None


def _run(classifier: Classifier, layer: str | None, batch: Tensor) -> tuple[Activations, Tensor]:
    """Activations, and what the kernel compares, (N, P)."""
    with outputs_of(classifier.network, [] if layer is None else [layer]) as seen:
        activations = classifier.run(batch)
    return activations, activations.features if layer is None else seen[layer]
