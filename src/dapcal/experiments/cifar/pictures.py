"""CIFAR-10, held-out images among them, and images of four other kinds; two of these are of our own making.

Textures and corruptions are made by a seed, are of other kinds than those that calibration makes of held-out images,
and confirm (or not) what SVHN and CIFAR-100 say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.experiments.cifar.task import PhotoTask
from dapcal.experiments.datasets import Images, as_floats, cifar10, cifar100, svhn
from dapcal.experiments.images.bench import Parts

SIDE = 32  # pixels


class Photographs(NamedTuple):
    """All images of the experiment, pixels between 0 and 1, on one device."""

    train: Parts
    held_out: Parts
    test: Parts
    outside: dict[str, Tensor]


def photographs(task: PhotoTask, seed: int, device: str) -> Photographs:
    """The data of a task; the seed says which images are held out, and makes those of our own making."""
    learnt, judged = cifar10("train"), cifar10("test")
    order = torch.randperm(len(learnt.y), generator=torch.Generator().manual_seed(seed))
    held, rest = order[: task.held_out], order[task.held_out :][: task.train]
    known: dict[str, Callable[[], Tensor]] = {
        "SVHN": lambda: _some(svhn("test"), task.test, seed)[0],
        "CIFAR-100": lambda: _some(cifar100("test"), task.test, seed)[0],
        "textures": lambda: textures(task.made, seed),
        "corruptions": lambda: corruptions(_some(judged, task.made, seed)[0], seed),
    }
    train, held_out = ((as_floats(learnt.x[rows]), learnt.y[rows]) for rows in (rest, held))
    outside = {name: known[name]().to(device) for name in task.outside}
    tested = _some(judged, task.test, seed)
    train, held_out, tested = ((x.to(device), y.to(device)) for x, y in (train, held_out, tested))
    return Photographs(train, held_out, tested, outside)


def textures(number: int, seed: int) -> Tensor:
    """Warped gratings of two colours, (N, 3, 32, 32): three waves of random directions and lengths, hard or soft."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(number, *shape, generator=generator)

    place = torch.arange(SIDE, dtype=torch.float32)
    angle, frequency, phase = uniform(0, math.pi, 3, 1, 1), uniform(0.03, 0.35, 3, 1, 1), uniform(0, 1, 3, 1, 1)
    along = angle.cos() * place + angle.sin() * place[:, None]  # (N, 3, 32, 32)
    bend = uniform(0, 0.5, 3, 1, 1) * (2 * math.pi * (place / SIDE + uniform(0, 1, 3, 1, 1))).sin()
    waves = (2 * math.pi * (frequency * along + phase + bend)).sin()
    mixed = torch.sigmoid(uniform(1, 8, 1, 1, 1) * (waves * uniform(0, 1, 3, 1, 1)).sum(1, keepdim=True))
    one, other = uniform(0, 1, 3, 1, 1), uniform(0, 1, 3, 1, 1)
    return _as_stored(one + (other - one) * mixed)


def corruptions(x: Tensor, seed: int) -> Tensor:
    """Each image (N, 3, H, W) in one of four ways that leave its pixels ordinary and what it shows not."""
    generator = torch.Generator().manual_seed(seed)
    ways = (_tiled, _waved, _solarised, _recoloured)
    which = torch.randint(len(ways), (len(x),), generator=generator)
    changed = x.clone()
    for number, way in enumerate(ways):
        changed[which == number] = way(x[which == number], generator)
    return _as_stored(changed)


def _tiled(x: Tensor, generator: torch.Generator) -> Tensor:
    """Sixteen tiles in another order."""
    n, channels, height, width = x.shape
    tiles = x.reshape(n, channels, 4, height // 4, 4, width // 4).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    order = torch.rand(n, 16, generator=generator).argsort(1)
    tiles = tiles[torch.arange(n)[:, None], order].unflatten(1, (4, 4))
    return tiles.permute(0, 3, 1, 4, 2, 5).reshape(x.shape)


def _waved(x: Tensor, generator: torch.Generator) -> Tensor:
    """Rows moved to the side along a wave of up to a quarter of the width."""
    n, _, height, width = x.shape
    phase = torch.rand(n, 1, generator=generator)
    shift = (width / 4 * (2 * math.pi * (phase + torch.arange(height) / 8)).sin()).round().long()  # (N, H)
    columns = (torch.arange(width) + shift[..., None]) % width
    return x.gather(3, columns[:, None].expand_as(x))


def _solarised(x: Tensor, generator: torch.Generator) -> Tensor:
    """Pixels brighter than a threshold turned around, so that what is bright becomes dark."""
    threshold = 0.3 + 0.3 * torch.rand(len(x), 1, 1, 1, generator=generator)
    return torch.where(x > threshold, 1 - x, x)


def _recoloured(x: Tensor, generator: torch.Generator) -> Tensor:
    """Colours exchanged, one of them inverted, and hardly any grey between dark and bright."""
    order = torch.rand(len(x), 3, generator=generator).argsort(1)
    changed = x[torch.arange(len(x))[:, None], order]
    changed[:, 0] = 1 - changed[:, 0]
    return torch.sigmoid(12 * (changed - 0.5))


def _as_stored(x: Tensor) -> Tensor:
    """With the 256 values that a file has."""
    return (255 * x.clamp(0, 1)).round() / 255


def _some(images: Images, most: int, seed: int) -> Parts:
    """At most so many, drawn by a seed: files may be sorted."""
    rows = torch.randperm(len(images.y), generator=torch.Generator().manual_seed(seed))[:most]
    return as_floats(images.x[rows]), images.y[rows]
