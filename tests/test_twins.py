"""Held-out inputs that are training inputs: noticed, unless training inputs are copies of each other as often."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import dapcal
from dapcal.distances import Space, nearest
from dapcal.distances.coresets import Coreset
from dapcal.distances.projectors import Features, Identity
from dapcal.distances.twins import notice
from dapcal.types import DapcalWarning


def rows(n, seed=0, kinds=None):
    """Inputs, all different, or out of some kinds."""
    generator = torch.Generator().manual_seed(seed)
    if kinds is None:
        return torch.randn(n, 3, generator=generator)
    return rows(kinds, 99)[torch.randint(kinds, (n,), generator=generator)]


def fitted(train, metric=nearest):
    return Space(Identity(), metric, radius=None, name="inputs").fit(train, train, network_alone())


def network_alone():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    scales = {name: torch.full_like(parameter, 0.1) for name, parameter in network.named_parameters()}
    return dapcal.posteriors.gaussian.diagonal(network, dapcal.likelihoods.Categorical(), scales)


def noticed(train, held_out, metric=nearest):
    space = fitted(train, metric)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        notice([(space, space.raw(held_out))], train)
    return [str(one.message) for one in caught if issubclass(one.category, DapcalWarning)]


@pytest.mark.parametrize(("overlap", "n"), [(100, 200), (10, 20), (10, 400)])
def test_training_inputs_among_the_held_out_ones_are_counted(overlap, n):
    train = rows(500)
    held_out = torch.cat([train[:overlap], rows(n - overlap, 1)])
    (message,) = noticed(train, held_out)
    assert message.startswith(f"{overlap} of {n} held-out inputs are training inputs too")
    assert "remove them" in message


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        (rows(500), rows(200, 1)),
        (rows(500), torch.cat([rows(500)[:4], rows(196, 1)])),  # 2 %
        (rows(500), torch.cat([rows(500)[:5], rows(10, 1)])),  # too few to tell
    ],
)
def test_ordinary_data_are_not_warned_about(train, held_out):
    assert not noticed(train, held_out)


@pytest.mark.parametrize("kinds", [50, 2000, 10_000])
def test_copies_that_the_data_have_by_themselves_are_none(kinds):
    for seed in range(20):
        assert not noticed(rows(500, seed, kinds), rows(200, 100 + seed, kinds))


def test_overlap_beyond_the_copies_that_the_data_have():
    train = torch.cat([rows(500), rows(500)[:25]])  # one in ten has a copy
    assert noticed(train, torch.cat([train[100:200], rows(100, 1)]))


def test_a_coreset_does_not_tell():
    train = rows(500)
    assert not noticed(train, train[:100], lambda points: nearest(points, index=Coreset(50)))


@pytest.mark.filterwarnings("ignore:The calibration loss")
@pytest.mark.parametrize(
    "distance", [None, Space(Identity()), Space(Features())], ids=["default", "inputs", "features"]
)
def test_calibration_warns_of_overlap(distance):
    x = rows(800)
    y = (x[:, 0] > 0).long()
    held_out = torch.cat([x[:100], x[500:600]])
    options = {"train": (x[:500], y[:500]), "distance": distance, "candidates": 5}
    posterior = network_alone()
    with pytest.warns(DapcalWarning, match="held-out inputs are training inputs too, so p-values are too small"):
        dapcal.calibrate(posterior, held_out=(held_out, (held_out[:, 0] > 0).long()), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dapcal.calibrate(posterior, held_out=(x[500:], y[500:]), **options)
    assert not [one for one in caught if "training inputs too" in str(one.message)]
