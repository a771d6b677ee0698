"""Calibrated predictions beside the bare passes of the networks that they are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from one_pass import images, lenet
from torch import Tensor, nn

import dapcal
from dapcal.calibrate import Calibrated
from dapcal.distances import Space
from dapcal.distances.projectors import Features, Identity
from dapcal.experiments.performance import Limit, Row
from dapcal.likelihoods import Categorical
from dapcal.posteriors import ensemble, laplace
from dapcal.types import Posterior
from performance.turns import in_turns, shares

__all__ = ["rows"]

BATCH, HELD_OUT = 512, 2000
FEATURES, PIXELS = Space(Features(), name="features"), Space(Identity(), name="inputs")


def rows(repeats: int, small: bool) -> list[Row]:
    torch.manual_seed(0)
    train, held_out = images(2000 if small else 58_000), images(HELD_OUT // 4 if small else HELD_OUT)
    x = images(1000 if small else 10_000)[0]
    networks = [trained(lenet(), train) for _ in range(5)]
    posteriors: dict[str, tuple[Posterior, Sequence[nn.Module], float]] = {
        "ensemble of five": (ensemble.of(networks, Categorical()), networks, 1.6),
        "last-layer Laplace": (laplace.last_layer(networks[0], Categorical(), train), networks[:1], 2.5),
    }
    found = []
    for name, (posterior, own, most) in posteriors.items():
        spaces = {"features": (FEATURES,), "features and pixels": (FEATURES, PIXELS)}
        ways: dict[str, Callable[[], object]] = {"passes": passes(own, x)}
        for title, distance in spaces.items():
            ways[title] = predicts(dapcal.calibrate(posterior, train=train, held_out=held_out, distance=distance), x)
        seconds = in_turns(ways, repeats)
        peer = f"passes of {'five networks' if len(own) > 1 else 'one network'} in plain PyTorch"
        found += [
            Row(
                f"{name}, LeNet-5, {len(x):,} images, {len(train[0]):,} training images, exact neighbours in {title}",
                "s",
                seconds[title],
                peer,
                seconds["passes"],
                Limit(most) if title == "features" else None,
                note="" if title == "features" else "pixels are 784 numbers a point; no limit is set for them",
                profile=shares(ways[title]),
            )
            for title in spaces
        ]
    return found


def passes(networks: Sequence[nn.Module], x: Tensor) -> Callable[[], Tensor]:
    """Mean probabilities of networks, as one would write it."""

    @torch.inference_mode()
    def run() -> Tensor:
        batches = x.split(BATCH)
        return torch.cat([torch.stack([one(batch).softmax(-1) for one in networks]).mean(0) for batch in batches])

    return run


def predicts(calibrated: Calibrated, x: Tensor) -> Callable[[], object]:
    return lambda: calibrated.predict(x, batch_size=BATCH)


def trained(network: nn.Module, train: tuple[Tensor, Tensor], steps: int = 200) -> nn.Module:
    """A little, so that features are those of a network that tells classes apart."""
    optimizer = torch.optim.Adam(network.parameters(), 2e-3)
    for _ in range(steps):
        rows = torch.randint(len(train[0]), (128,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(train[0][rows]), train[1][rows]).backward()
        optimizer.step()
    return network.eval()
