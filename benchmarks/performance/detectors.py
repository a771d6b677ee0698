"""Detectors beside pytorch-ood's: fitted to training images, then 10,000 images scored, with one network."""

from __future__ import annotations

from collections.abc import Callable

import torch
from one_pass import images, lenet
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from dapcal.detectors import knn, mahalanobis
from dapcal.experiments.performance import AS_FAST, Row
from performance.apart import peaks
from performance.no_torchvision import stand_in
from performance.turns import in_turns, shares

__all__ = ["rows"]

NAMES, BATCH, K = {"knn": "distance to the 50th neighbour", "mahalanobis": "Mahalanobis distance"}, 512, 50
PEER = "pytorch-ood"


def rows(repeats: int, small: bool) -> list[Row]:
    sizes = (2000, 500) if small else (50_000, 10_000)
    found = []
    for name, words in NAMES.items():
        ways = {who: prepare(name, who, *sizes) for who in ("ours", PEER)}
        seconds = in_turns(ways, repeats)
        memory = {who: peaks(repeats, prepare_alone, name, who, *sizes) for who in ways}
        title = f"{words}, LeNet-5, fit to {sizes[0]:,} images and score {sizes[1]:,}"
        order = rank_correlation(*(way() for way in ways.values()))
        found += [
            Row(
                title, "s", seconds["ours"], PEER, seconds[PEER], AS_FAST,
                note=f"rank correlation of the scores {order:.4f}", profile=shares(ways["ours"]),
            ),
            Row(f"memory of {title}", "MiB", memory["ours"], PEER, memory[PEER], AS_FAST),
        ]  # fmt: skip
    return found


def prepare(name: str, who: str, train: int, new: int) -> Callable[[], Tensor]:
    """A way from a network and images to scores (N,)."""
    torch.manual_seed(0)
    network, data, x = lenet().eval(), images(train), images(new)[0]
    if who == "ours":
        fits = {
            "knn": lambda: knn.fit(network, data, k=K, batch_size=BATCH),
            "mahalanobis": lambda: mahalanobis.fit(network, data, shrinkage=0.0, batch_size=BATCH),
        }
        return lambda: fits[name]()(x)
    stand_in()
    from pytorch_ood.detector import KNN, Mahalanobis

    encoder = network[:-1]
    detectors = {"knn": lambda: KNN(encoder, k=K), "mahalanobis": lambda: Mahalanobis(encoder)}

    @torch.inference_mode()
    def theirs() -> Tensor:
        detector = detectors[name]().to("cpu").fit(DataLoader(TensorDataset(*data), batch_size=BATCH))
        return torch.cat([detector.predict(batch) for batch in x.split(BATCH)])

    return theirs


def prepare_alone(name: str, who: str, train: int, new: int) -> Callable[[], float]:
    """The same with an answer that is plain enough for JSON, everything loaded before."""
    prepare(name, who, 500, 10)()
    call = prepare(name, who, train, new)
    return lambda: float(call().mean())


def rank_correlation(one: Tensor, other: Tensor) -> float:
    """Spearman's; theirs is half of a distance that is not divided by N, which leaves the order as it is."""
    ranks = torch.stack([scores.argsort().argsort().double() for scores in (one, other)])
    return float(torch.corrcoef(ranks)[0, 1])
