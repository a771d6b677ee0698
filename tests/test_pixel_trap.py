"""The trap of photographs: in pixels smooth images are near everything, however well that distance predicts errors.

`benchmarks/pixel_trap.py` does the same with CIFAR-10.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

import dapcal
from dapcal.likelihoods import Categorical
from dapcal.posteriors import dropout, ensemble, laplace
from dapcal.posteriors import map as map_posterior

pytestmark = pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")


def photographs(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Coloured textures of any contrast, in two tints; where contrast is high, labels are often wrong."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 2
    colours = interpolate(torch.randn(n, 3, 3, 3, generator=generator), size=16, mode="bilinear")
    grain = torch.randn(n, 3, 16, 16, generator=generator)
    contrast = 0.2 + torch.rand(n, 1, 1, 1, generator=generator)
    tint = (2.0 * y - 1)[:, None, None, None] * torch.tensor([1.0, 0.0, -1.0])[:, None, None]
    wrong = torch.rand(n, generator=generator) < 0.5 * (contrast.flatten() - 0.2)
    return 0.5 + 0.1 * (colours + 2 * contrast * grain + tint), torch.where(wrong, 1 - y, y)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Dropout(0.1), nn.Linear(16, 2),
    )  # fmt: skip


OPTIONS = {"epochs": 12, "learning_rate": 0.01, "batch_size": 64}


def one_network(train, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return map_posterior.fit(convolutional(), Categorical(), train, seed=seed, **OPTIONS).network


POSTERIORS = {
    "Laplace": lambda train, seed: laplace.last_layer(one_network(train, seed), Categorical(), train),
    "ensemble": lambda train, seed: ensemble.fit(convolutional, Categorical(), train, members=2, seed=seed, **OPTIONS),
    "dropout": lambda train, seed: dropout.wrap(one_network(train, seed), Categorical(), draws=5),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", POSTERIORS)
def test_pixels_are_out_for_every_posterior_and_seed(name, seed):
    train, held_out = photographs(400, 10 + seed), photographs(600, 20 + seed)
    calibrated = dapcal.calibrate(POSTERIORS[name](train, seed), train=train, held_out=held_out)
    (note,) = [note for note in calibrated.notes if note.startswith("distance between inputs:")]
    assert "out: blurred" in note
    assert float(note.split("AUROC ")[1][:4]) > 0.55  # though it does predict errors
    assert "inputs" not in [space.name for space in calibrated.distance.spaces]
