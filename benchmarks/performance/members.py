"""Five members trained side by side, beside one."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from dapcal.data import Labelled
from dapcal.experiments.performance import Limit, Row
from dapcal.likelihoods import Categorical
from dapcal.posteriors import ensemble
from dapcal.posteriors import map as map_posterior
from performance.turns import in_turns, shares

__all__ = ["rows"]

MEMBERS, MOST = 5, Limit(1.6)


def rows(repeats: int, small: bool) -> list[Row]:
    count, epochs = (1000, 4) if small else (8000, 15)
    train, held_out = labelled(count, 0), labelled(count // 4, 1)
    options = {"epochs": epochs, "batch_size": 128, "learning_rate": 1e-3}

    def side_by_side(members: int) -> object:
        return ensemble.fit_each(network, Categorical(), [train], [held_out], members=members, **options)

    def alone() -> object:
        own = {"held_out": (held_out.x, held_out.y), "patience": epochs}
        return map_posterior.fit(network(), Categorical(), (train.x, train.y), **own, **options)

    ways = {"five": partial(side_by_side, MEMBERS), "one": partial(side_by_side, 1), "trainer": alone}
    seconds = in_turns(ways, repeats)
    name = f"five members of 20-64-64-3, {count:,} rows, {epochs} epochs"
    told = {"limit": MOST, "profile": shares(ways["five"])}
    return [
        Row(name, "s", seconds["five"], "one member, the same way", seconds["one"], **told),
        Row(name, "s", seconds["five"], "one network by `posteriors.map.fit`", seconds["trainer"], **told),
    ]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def labelled(count: int, seed: int) -> Labelled:
    x = torch.randn(count, 20, generator=torch.Generator().manual_seed(seed))
    return Labelled(x, torch.stack([x[:, first::3].sum(1) for first in range(3)], 1).argmax(1))
