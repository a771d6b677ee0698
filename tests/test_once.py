"""Neighbours are searched once: no metric is asked twice for the distances of the same inputs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import dapcal
from cases import inputs, network_posterior
from dapcal.adjust import Inflate
from dapcal.distances import NearestNeighbor, Space
from dapcal.distances.once import once, searched_once
from dapcal.distances.projectors import Features, Identity
from dapcal.likelihoods import Categorical

pytestmark = pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")


@pytest.fixture
def searches(monkeypatch):
    """How often each metric was asked for each batch of points, by what the points are."""
    asked: Counter[tuple[int, bytes]] = Counter()
    kept = []
    inner = NearestNeighbor.__call__

    def counted(metric: NearestNeighbor, points: torch.Tensor) -> torch.Tensor:
        kept.append(metric)
        asked[id(metric), points.numpy().tobytes()] += 1
        return inner(metric, points)

    monkeypatch.setattr(NearestNeighbor, "__call__", counted)
    return asked


def data(generator, n):
    x = inputs(n)
    return x + 0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype), torch.arange(n) % 3


@pytest.mark.parametrize("distance", [None, (Space(Features()), Space(Identity(), radius=None))])
def test_calibration_searches_nothing_twice(generator, searches, distance):
    held_out = data(generator, 400)  # so many that weights and verdicts ask different outliers
    dapcal.calibrate(
        network_posterior(Categorical(), 3), train=data(generator, 80), held_out=held_out, distance=distance
    )
    assert searches
    assert set(searches.values()) == {1}


@pytest.mark.parametrize("ask", [dapcal.Calibrated.__call__, dapcal.Calibrated.joint])
def test_predictions_search_every_space_once(generator, searches, ask):
    posterior, train = network_posterior(Categorical(), 3), data(generator, 80)
    spaces = (Space(Features()), Space(Identity()))
    calibrated = dapcal.calibrate(
        posterior, train=train, held_out=data(generator, 60), distance=spaces, adjust=Inflate(drawn=True)
    )
    searches.clear()
    ask(calibrated, train[0][:5])
    assert list(searches.values()) == [1, 1]


def test_what_is_kept_is_of_this_tensor_and_this_metric_while_it_is_open():
    metric, other, x = (lambda z: z), (lambda z: z), torch.zeros(3)
    found = []

    def search() -> torch.Tensor:
        found.append(len(found))
        return torch.tensor(len(found))

    with searched_once(x):
        assert once(metric, x, search) is once(metric, x, search)
        assert once(other, x, search) == 2
        assert once(metric, x.clone(), search) == 3
    assert once(metric, x, search) == 4
