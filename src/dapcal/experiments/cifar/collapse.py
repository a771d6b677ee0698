"""Feature collapse in numbers: how much of an image is left in the features of a network (an open question)."""

from __future__ import annotations

import torch
from torch import Tensor

from dapcal.distances.covariance import class_means
from dapcal.experiments.cifar.bench import PhotoBench
from dapcal.networks import feature_layer, layer_input
from dapcal.ranks import auroc

PAIRS = 10_000  # of test images


def of_map(bench: PhotoBench) -> dict[str, dict[str, float]]:
    """Of the network itself, whose features are there already; as a fact of its row."""
    readout = bench.readout
    return _fact(bench, readout.train[0], readout.at(bench.test[0]))


def of_spectral(bench: PhotoBench) -> dict[str, dict[str, float]]:
    """Of the network whose layers are spectrally normalised."""
    network = bench.spectral.network
    layer, _ = feature_layer(network, bench.train[0][:1])
    return _fact(bench, *(layer_input(network, layer, x) for x in (bench.train[0], bench.test[0])))


def _fact(bench: PhotoBench, learnt: Tensor, tested: Tensor) -> dict[str, dict[str, float]]:
    return {"collapse": collapse_of(learnt, bench.train[1], bench.test[0].flatten(1), tested)}


def collapse_of(features: Tensor, y: Tensor, images: Tensor, seen_as: Tensor) -> dict[str, float]:
    """Three numbers.

    `within`: variance inside classes over that between their means, tr Σ_W / tr Σ_B; 0 is complete collapse.
    `dimensions`: participation ratio (Σ λ)² / Σ λ² of the covariance's eigenvalues; classes minus one is collapse.
    `far_stays_far`: of random pairs, the AUROC with which the distance of features tells the farther half by pixels
    from the nearer; ½ says that nothing of the distance between images is left.

    Args:
        features: of the training images, (N, P).
        y: their labels.
        images: other images as vectors, (M, D).
        seen_as: their features, (M, P).
    """
    means, counts, members = class_means(features, y)
    center = features.double().mean(0)
    inside = (features.double() - means.double()[members]).square().sum(1).mean()
    between = ((means.double() - center).square().sum(1) * counts / counts.sum()).sum()
    covariance = torch.cov(features.double().T)
    one, other = torch.randint(len(images), (2, PAIRS), generator=torch.Generator().manual_seed(0)).to(images.device)
    pixels, points = ((z[one] - z[other]).norm(dim=1) for z in (images, seen_as))
    farther = pixels > pixels.median()
    return {
        "within": float(inside / between),
        "dimensions": float(covariance.trace() ** 2 / covariance.square().sum()),
        "far_stays_far": auroc(points[farther], points[~farther]),
    }
