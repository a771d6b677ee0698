"""Density-aware calibration: a temperature that grows with the distance to training inputs, in several layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from dapcal.data import Data, check_inputs, gather
from dapcal.detectors.activations import BATCH, Classifier, batchwise, checked_labels, classifier_of
from dapcal.detectors.knn import check_neighbours
from dapcal.detectors.layers import outputs_of, spread_out, weight_layers
from dapcal.detectors.logits import entropy_of
from dapcal.detectors.temperature import best_temperature
from dapcal.distances.neighbors import TorchIndex

LEAST = 1e-3  # of the offset w_0: the temperature stays above it


def fit(
    network: nn.Module,
    train: Data,
    held_out: Data,
    *,
    k: int = 50,
    layers: Sequence[str] | None = None,
    unit: bool = True,
    batch_size: int = BATCH,
) -> DAC:
    """softmax(f(x)/S(x)) with S(x) = Σ_l w_l s_l(x) + w_0 and the distances s_l to the k-th neighbour in layer l.

    Tomani, Waseda, Shen, Cremers (2023), arXiv:2302.05118. As there: w_l >= 0, feature vectors of unit length,
    convolutional maps averaged over places, L-BFGS-B. Otherwise: all w minimise the held-out NLL (the paper's text has
    the squared error), w_0 >= 0.001 (there free, and S clipped), distances are not squared, and the search also starts
    from temperature scaling (w_l = 0), so that it never ends with a larger held-out NLL than that.

    Args:
        network: a trained classifier.
        train: what it was trained on (labels are not used).
        held_out: inputs and labels that it was not trained on.
        k: which neighbour.
        layers: names of the layers whose outputs count beside features and logits; by default up to three linear or
            convolutional ones, evenly spaced.
        unit: divide each vector by its length.
        batch_size: inputs per forward pass.
    """
    inputs = gather(train, "train").x
    x, y = gather(held_out, "held_out")
    check_neighbours(k, len(inputs))
    classifier = classifier_of(network, inputs, batch_size)
    names = _default_layers(classifier, inputs) if layers is None else list(layers)
    known = weight_layers(classifier.network, inputs[:1])
    if not set(names) <= set(known):
        raise ValueError(
            f"Expected `layers` among the linear and convolutional ones that run once, got {names}; they are {known}"
        )
    points, _ = _all_points(classifier, names, inputs, unit)
    bare = DAC(classifier, tuple(names), tuple(map(TorchIndex, points)), torch.empty(0), 1.0, k, unit)
    held_out_points, logits = _all_points(classifier, names, x, unit)
    distances = bare.distances(held_out_points)
    weights, offset = fit_weights(distances, logits.double(), checked_labels(logits, y))
    return DAC(classifier, bare.layers, bare.indices, weights, offset, k, unit)


@dataclass(frozen=True, eq=False)
class DAC:
    """Entropy of softmax(f(x)/S(x)).

    Attributes:
        classifier: gives features and logits.
        layers: whose outputs count beside those two.
        indices: of the training points in the layers, the features and the logits, in that order (L of them).
        weights: w_l, (L,).
        offset: w_0.
        k: which neighbour.
        unit: whether vectors have unit length.
    """

    classifier: Classifier
    layers: tuple[str, ...]
    indices: tuple[TorchIndex, ...]
    weights: Tensor
    offset: float
    k: int
    unit: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Scores (N,)."""
        return batchwise(lambda batch: entropy_of(self._scaled(batch)), x, self.classifier.batch_size)

    def probs(self, x: Tensor) -> Tensor:
        """Class probabilities (N, K)."""
        return batchwise(lambda batch: self._scaled(batch).softmax(-1), x, self.classifier.batch_size)

    def temperature(self, x: Tensor) -> Tensor:
        """S(x), (N,)."""

        def temperature(batch: Tensor) -> Tensor:
            return self._temperature(_points(self.classifier, self.layers, batch, self.unit)[0])

        return batchwise(temperature, x, self.classifier.batch_size)

    def distances(self, points: Sequence[Tensor]) -> Tensor:
        """s_l, (N, L) in float64, of points in all layers."""
        found = [index.query(p, self.k)[0][:, -1] for index, p in zip(self.indices, points, strict=True)]
        return torch.stack(found, 1).double()

    def _temperature(self, points: Sequence[Tensor]) -> Tensor:
        return self.distances(points) @ self.weights + self.offset

    def _scaled(self, batch: Tensor) -> Tensor:
        points, logits = _points(self.classifier, self.layers, batch, self.unit)
        return logits.double() / self._temperature(points)[:, None]


def fit_weights(distances: Tensor, logits: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    """w (L,) and w_0 of smallest NLL.

    Args:
        distances: s_l, (N, L).
        logits: (N, K).
        labels: (N,).
    """
    from scipy.optimize import minimize

    unit = distances.mean(0).where(distances.mean(0) > 0, 1.0)  # weights of one order of magnitude search better
    design = torch.cat([distances / unit, torch.ones_like(distances[:, :1])], 1)
    right = logits.gather(1, labels[:, None])[:, 0]

    def nll(weights: np.ndarray) -> tuple[float, np.ndarray]:
        """And its gradient: ∂/∂S = (f_y − E f)/S²."""
        temperature = design @ torch.as_tensor(weights).to(design)
        log_p = (logits / temperature[:, None]).log_softmax(-1)
        slope = (right - (log_p.exp() * logits).sum(1)) / temperature**2
        value = -log_p.gather(1, labels[:, None]).mean()
        return float(value), (slope @ design / len(design)).cpu().numpy()

    bounds = [(0.0, None)] * distances.shape[1] + [(LEAST, None)]
    even = np.ones(len(bounds)) / len(bounds)
    alone = np.append(np.zeros(len(bounds) - 1), max(best_temperature(logits, labels), LEAST))
    options = {"ftol": 1e-12, "gtol": 1e-8, "maxiter": 1000}
    found = [minimize(nll, at, jac=True, method="L-BFGS-B", bounds=bounds, options=options) for at in (even, alone)]
    best = torch.as_tensor(min(found, key=lambda result: result.fun).x).to(design)
    return best[:-1] / unit, float(best[-1])


def _default_layers(classifier: Classifier, x: Tensor) -> list[str]:
    names = weight_layers(classifier.network, x[:1])
    return spread_out([name for name in names if name != classifier.layer], 3)


def _points(classifier: Classifier, layers: Sequence[str], batch: Tensor, unit: bool) -> tuple[list[Tensor], Tensor]:
    """Points in the layers, the features and the logits; and the logits as they are."""
    with outputs_of(classifier.network, layers) as seen:
        features, logits = classifier.run(batch)
    points = [*(seen[name] for name in layers), features, logits]
    return [normalize(p) if unit else p for p in points], logits


def _all_points(classifier: Classifier, layers: Sequence[str], x: Tensor, unit: bool) -> tuple[list[Tensor], Tensor]:
    with torch.no_grad():
        parts = [
            _points(classifier, layers, batch, unit) for batch in check_inputs(x, "x").split(classifier.batch_size)
        ]
    columns = zip(*(points for points, _ in parts), strict=True)
    return [torch.cat(column) for column in columns], torch.cat([logits for _, logits in parts])
