"""Small posteriors whose neighbours are found approximately: lists, codes, kept points, and a graph."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dapcal
import previous_cases
from dapcal.distances import HNSW, IVF, Coreset, ProductQuantised, Space, nearest
from dapcal.distances.projectors import Identity
from dapcal.likelihoods import Categorical
from dapcal.posteriors import ensemble
from dapcal.types import Posterior

ROWS = 300  # codes need 256


def kinds() -> dict[str, Callable[[], dapcal.Calibrated]]:
    """By name; those that faiss searches where it is installed."""
    indices: dict[str, Callable[[Tensor], Any]] = {"lists": IVF(lists=6), "kept points": Coreset(20)}
    if importlib.util.find_spec("faiss"):
        indices |= {"codes": ProductQuantised(pieces=1, lists=3), "graph": HNSW(links=4)}
    return {name: partial(_calibrated, index) for name, index in indices.items()}


def predicted(path: Path) -> Tensor:
    """What a file predicts for rows near and far."""
    x = torch.cat([previous_cases.inputs(), previous_cases._classes(40, 2)[0]])
    found = dapcal.load(path, previous_cases.smooth())(x)
    return torch.cat([found.mean.flatten().double(), found.distance.double(), found.ood_p_value])


def _calibrated(index: Callable[[Tensor], Any]) -> dapcal.Calibrated:
    space = Space(Identity(), partial(nearest, index=index), name="inputs")
    train, held_out = previous_cases._classes(ROWS, 0), previous_cases._classes(60, 1)
    return dapcal.calibrate(_posterior(), train=train, held_out=held_out, distance=space, candidates=3)


@cache
def _posterior() -> Posterior:
    train = previous_cases._classes(60, 0)
    return ensemble.fit(previous_cases.smooth, Categorical(), train, members=3, epochs=20, batch_size=20)
