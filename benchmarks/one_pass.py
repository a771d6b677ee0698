"""A prediction outside of the neighbour search: passes over the networks shared, and a pass for each who asks.

LeNet-5 on 10,000 made-up images of 28 x 28, 2,000 training images; distances between features and inputs, normalised
features in the OOD score. "Apart" is how it was before passes were shared: features, normalised features and posterior
each ran the network.

Run: python benchmarks/one_pass.py [--images 10000] [--repeats 3]
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

import dapcal
from dapcal.calibrate import Calibrated
from dapcal.distances import Space
from dapcal.distances.neighbors import TorchIndex
from dapcal.distances.projectors import Features, Identity
from dapcal.likelihoods import Categorical
from dapcal.networks import passes
from dapcal.posteriors import ensemble, laplace
from dapcal.posteriors import network as posterior_network


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore", dapcal.DapcalWarning)
    torch.manual_seed(0)
    train, held_out = images(2000), images(400)
    x = images(options.images)[0]
    posteriors = {
        "last-layer Laplace": laplace.last_layer(lenet(), Categorical(), train),
        "ensemble of five": ensemble.of([lenet() for _ in range(5)], Categorical()),
    }
    for name, posterior in posteriors.items():
        calibrated = prepared(dapcal.calibrate(posterior, train=train, held_out=held_out, distance=SPACES))
        seconds = {"apart": [], "shared": []}
        for _ in range(options.repeats):
            with apart():
                seconds["apart"].append(outside_neighbours(calibrated, x))
            seconds["shared"].append(outside_neighbours(calibrated, x))
        before, after = (min(values) for values in seconds.values())
        print(f"{name}: {before:.2f} s apart, {after:.2f} s shared, ratio {after / before:.2f}", flush=True)


SPACES = (Space(Features(), name="features"), Space(Identity(), name="inputs"))


def prepared(calibrated: Calibrated) -> Calibrated:
    """With normalised features in the OOD score, as the default distance has them."""
    features = calibrated.distance.spaces[0]
    unit = replace(features, projector=replace(features.projector, unit=True), radius=None, name="normalised features")
    evidence = calibrated.evidence
    one = torch.ones(1, dtype=evidence.center.dtype)
    more = {"center": torch.cat([evidence.center, 0 * one]), "scale": torch.cat([evidence.scale, one])}
    return replace(calibrated, evidence=replace(evidence, further=(unit,), weights=None, **more))


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def images(n: int) -> tuple[Tensor, Tensor]:
    """A smooth pattern a class, others at random strengths, and noise: features then vary in many directions.

    Had they one (brightness), neighbours would lie so near that every search compares doubles.
    """
    fixed = torch.Generator().manual_seed(99)
    patterns = nn.functional.interpolate(torch.randn(40, 1, 7, 7, generator=fixed), size=28, mode="bilinear")
    y = torch.arange(n) % 10
    others = (torch.randn(n, 30) @ patterns[10:].flatten(1)).view(n, 1, 28, 28)
    return patterns[y] + 0.5 * others + 0.3 * torch.randn(n, 1, 28, 28), y


def outside_neighbours(calibrated: Calibrated, x: Tensor) -> float:
    searching = 0.0
    query = TorchIndex.query

    def timed(index: TorchIndex, points: Tensor, k: int) -> tuple[Tensor, Tensor]:
        nonlocal searching
        start = time.perf_counter()
        found = query(index, points, k)
        searching += time.perf_counter() - start
        return found

    TorchIndex.query = timed
    try:
        start = time.perf_counter()
        calibrated.predict(x, batch_size=2000)
        return time.perf_counter() - start - searching
    finally:
        TorchIndex.query = query


@contextmanager
def apart() -> Callable[[], None]:
    """Nobody finds a pass of somebody else's."""
    found = passes.open_pass

    def none(network: nn.Module | None, x: Tensor) -> None:  # noqa: ARG001
        return None

    passes.open_pass = posterior_network.open_pass = none
    try:
        yield
    finally:
        passes.open_pass = posterior_network.open_pass = found


if __name__ == "__main__":
    main()
