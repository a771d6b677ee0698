"""Calibrated predictions beside the bare passes of the networks that they are made of."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from one_pass import images, lenet
from torch import Tensor, nn

import dapcal
from dapcal.calibrate import Calibrated
from dapcal.distances import HNSW, Space, nearest
from dapcal.distances.projectors import Features, Identity
from dapcal.ensembles import seen
from dapcal.experiments.performance import AS_FAST, Limit, Row
from dapcal.likelihoods import Categorical
from dapcal.posteriors import ensemble, laplace
from dapcal.types import Posterior
from performance.apart import peaks
from performance.turns import in_turns, shares

__all__ = ["rows"]

BATCH, HELD_OUT = 512, 2000
FEATURES, PIXELS = Space(Features(), name="features"), Space(Identity(), name="inputs")
GRAPH = partial(nearest, index=HNSW())  # the approximate index that is fastest at a recall of 0.95
FEATURE_GRAPH, PIXEL_GRAPH = replace(FEATURES, metric=GRAPH), replace(PIXELS, metric=GRAPH)
SPACES = {
    "exact neighbours in features": (FEATURES,),
    "approximate neighbours in features": (FEATURE_GRAPH,),
    "exact neighbours in features and pixels": (FEATURES, PIXELS),
    "approximate neighbours in features and pixels": (FEATURE_GRAPH, PIXEL_GRAPH),
}
ENSEMBLE, LAPLACE = "ensemble of five", "last-layer Laplace"
LIMITS = {ENSEMBLE: (1.6, 1.15, 2.5, 1.3), LAPLACE: (2.5, 1.3)}  # of spaces, in their order


def rows(repeats: int, small: bool) -> list[Row]:
    torch.manual_seed(0)
    train, held_out = images(2000 if small else 58_000), images(HELD_OUT // 4 if small else HELD_OUT)
    x = images(1000 if small else 10_000)[0]
    networks = [trained(lenet(), train) for _ in range(5)]
    posteriors: dict[str, tuple[Posterior, Sequence[nn.Module]]] = {
        ENSEMBLE: (ensemble.of(networks, Categorical()), networks),
        LAPLACE: (laplace.last_layer(networks[0], Categorical(), train), networks[:1]),
    }
    found = []
    for name, (posterior, own) in posteriors.items():
        fitted = {
            title: dapcal.calibrate(posterior, train=train, held_out=held_out, distance=spaces)
            for title, spaces in list(SPACES.items())[: len(LIMITS[name])]
        }
        ways: dict[str, Callable[[], object]] = {"passes": passes(own, x), "posterior": means(posterior, x)}
        ways |= {title: predicts(calibrated, x) for title, calibrated in fitted.items()}
        seconds = in_turns(ways, repeats)
        peer = f"passes of {'five networks' if len(own) > 1 else 'one network'} in plain PyTorch"
        most = dict(zip(SPACES, map(Limit, LIMITS[name]), strict=False))
        found.append(
            Row(
                f"{name}, LeNet-5, {len(x):,} images, probabilities alone", "s", seconds["posterior"], peer,
                seconds["passes"], AS_FAST if len(own) > 1 else None, profile=shares(ways["posterior"]),
                note="" if len(own) > 1 else "a posterior's mean, where the peer has the network's probabilities",
            )
        )  # fmt: skip
        found += [
            Row(
                f"{name}, LeNet-5, {len(x):,} images, {len(train[0]):,} training images, {title}",
                "s",
                seconds[title],
                peer,
                seconds["passes"],
                most[title],
                note=told(calibrated),
                profile=shares(ways[title]),
            )
            for title, calibrated in fitted.items()
        ]
        if name == ENSEMBLE:
            found += memory(fitted[next(iter(SPACES))], len(x), repeats)
    return found


def memory(calibrated: Calibrated, images_asked: int, repeats: int) -> list[Row]:
    """Of predictions, with distances and without, beside those of bare networks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.dap"
        calibrated.save(path)
        found = {way: peaks(repeats, prepare_alone, way, str(path), images_asked) for way in WAYS}
    title = f"memory of {images_asked:,} predictions, {ENSEMBLE}, LeNet-5"
    return [
        Row(
            f"{title}, {WAYS[way]}",
            "MiB",
            found[way],
            "passes of five networks in plain PyTorch",
            found[PLAIN],
            AS_FAST,
        )
        for way in ("posterior", "calibrated")
    ]


PLAIN = "plain"
WAYS = {PLAIN: "", "posterior": "probabilities alone", "calibrated": next(iter(SPACES))}


def prepare_alone(way: str, path: str, count: int) -> Callable[[], float]:
    """Predictions by a way, with an answer that is plain enough for JSON; everything else is loaded before."""
    torch.manual_seed(0)
    x, networks = images(count)[0], [lenet().eval() for _ in range(5)]

    def made() -> Callable[[Tensor], object]:
        loaded = dapcal.load(path, lenet())
        ways: dict[str, Callable[[Tensor], Callable[[], object]]] = {
            PLAIN: partial(passes, networks),
            "posterior": partial(means, loaded.posterior),
            "calibrated": partial(predicts, loaded),
        }
        return lambda asked: ways[way](asked)()

    made()(x[:10])
    call = made()
    return lambda: len([call(x)]) + 0.0


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


def means(posterior: Posterior, x: Tensor) -> Callable[[], Tensor]:
    """The same numbers of a posterior, without distances."""
    return lambda: torch.cat([posterior.likelihood.mean(seen(posterior, batch)) for batch in x.split(BATCH)])


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
