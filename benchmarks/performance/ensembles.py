"""Calibrated predictions beside the bare passes of the networks that they are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from one_pass import images, lenet
from torch import Tensor, nn

import dapcal
from dapcal.calibrate import Calibrated
from dapcal.distances import IVF, Space, nearest
from dapcal.distances.projectors import Features, Identity
from dapcal.experiments.performance import Limit, Row
from dapcal.likelihoods import Categorical
from dapcal.posteriors import ensemble, laplace
from dapcal.types import Posterior
from performance.turns import in_turns, shares

__all__ = ["rows"]

BATCH, HELD_OUT = 512, 2000
FEATURES, PIXELS = Space(Features(), name="features"), Space(Identity(), name="inputs")
LISTS = Space(Features(), metric=partial(nearest, index=IVF()), name="features")
SPACES = {
    "exact neighbours in features": (FEATURES,),
    "approximate neighbours in features": (LISTS,),
    "exact neighbours in features and pixels": (FEATURES, PIXELS),
}
LIMITS = {"ensemble of five": (1.6, 1.15), "last-layer Laplace": (2.5, 1.3)}  # exact and approximate, in features


def rows(repeats: int, small: bool) -> list[Row]:
    torch.manual_seed(0)
    train, held_out = images(2000 if small else 58_000), images(HELD_OUT // 4 if small else HELD_OUT)
    x = images(1000 if small else 10_000)[0]
    networks = [trained(lenet(), train) for _ in range(5)]
    posteriors: dict[str, tuple[Posterior, Sequence[nn.Module]]] = {
        "ensemble of five": (ensemble.of(networks, Categorical()), networks),
        "last-layer Laplace": (laplace.last_layer(networks[0], Categorical(), train), networks[:1]),
    }
    found = []
    for name, (posterior, own) in posteriors.items():
        fitted = {
            title: dapcal.calibrate(posterior, train=train, held_out=held_out, distance=spaces)
            for title, spaces in SPACES.items()
        }
        ways: dict[str, Callable[[], object]] = {"passes": passes(own, x)}
        ways |= {title: predicts(calibrated, x) for title, calibrated in fitted.items()}
        seconds = in_turns(ways, repeats)
        peer = f"passes of {'five networks' if len(own) > 1 else 'one network'} in plain PyTorch"
        most = dict(zip(SPACES, map(Limit, LIMITS[name]), strict=False))
        found += [
            Row(
                f"{name}, LeNet-5, {len(x):,} images, {len(train[0]):,} training images, {title}",
                "s",
                seconds[title],
                peer,
                seconds["passes"],
                most.get(title),
                note=told(calibrated) if title in most else "pixels are 784 numbers a point; no limit is set for them",
                profile=shares(ways[title]),
            )
            for title, calibrated in fitted.items()
        ]
    return found


def told(calibrated: Calibrated) -> str:
    """How good an approximate index is; empty of an exact one."""
    return "; ".join(note for note in calibrated.notes if "recall" in note)


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
