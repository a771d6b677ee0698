"""Features, normalised features, OOD score and last layer of one batch come from a single run of each network."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

import dapcal
from dapcal.distances import Space
from dapcal.distances.choosing import measure
from dapcal.distances.projectors import Features, Identity, LayerFeatures, project
from dapcal.ensembles import Evaluated, seen
from dapcal.likelihoods import Categorical
from dapcal.networks import entering, layer_input, shared
from dapcal.posteriors import ensemble, laplace, variational

pytestmark = pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")
SPACES = (Space(Features(), name="features"), Space(Features(unit=True), name="normalised"), Space(Identity()))


class Counted(nn.Module):
    """A small convolutional network that counts how often it runs."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 36, 8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.runs += 1
        return self.head(self.body(x))


@pytest.fixture
def images(generator):
    def draw(n: int):
        y = torch.arange(n) % 3
        return torch.randn(n, 1, 8, 8, generator=generator) + y[:, None, None, None], y

    return draw(120), draw(90)


def runs(function) -> int:
    Counted.runs = 0
    function()
    return Counted.runs


@pytest.mark.parametrize("structure", [laplace.Kronecker, laplace.Full, laplace.Diagonal])
def test_a_last_layer_predicts_with_one_pass(images, structure):
    train, held_out = images
    posterior = laplace.last_layer(Counted(), Categorical(), train, structure=structure)
    calibrated = dapcal.calibrate(posterior, train=train, held_out=held_out, distance=SPACES)
    assert runs(lambda: calibrated(held_out[0])) == 1
    assert runs(lambda: calibrated(torch.cat([held_out[0]] * 12))) == 3  # batches of 512


@pytest.mark.parametrize("members", [2, 5])
def test_an_ensemble_of_m_predicts_with_m_passes(images, members):
    train, held_out = images
    posterior = ensemble.of([Counted() for _ in range(members)], Categorical())
    calibrated = dapcal.calibrate(posterior, train=train, held_out=held_out, distance=SPACES)
    assert runs(lambda: calibrated(held_out[0])) == members
    assert runs(lambda: posterior.outputs(held_out[0])) == members


def test_a_mean_that_is_no_draw_takes_one_more(images):
    train, held_out = images
    posterior = variational.fit(Counted(), Categorical(), train, epochs=1, draws=4)
    calibrated = dapcal.calibrate(posterior, train=train, held_out=held_out, distance=SPACES)
    assert runs(lambda: calibrated(held_out[0])) == 5


def test_what_is_shared_is_what_a_pass_of_its_own_gives(images):
    (x, _), _ = images
    posterior = ensemble.of([Counted() for _ in range(3)], Categorical())
    projector = LayerFeatures(posterior.network, "head")
    alone = project(projector, x)
    with shared(posterior.network, x, ["head"]):
        outputs = posterior.outputs(x)
        assert runs(lambda: project(projector, x)) == 0
        assert torch.equal(project(projector, x), alone)
        assert runs(lambda: project(projector, x.clone())) == 1  # another tensor, even if it is equal
    assert torch.equal(outputs, posterior.outputs(x))
    assert runs(lambda: project(projector, x)) == 1  # closed: nothing is kept


def test_training_inputs_stay_at_distance_zero(images):
    train, held_out = images
    posterior = ensemble.of([Counted() for _ in range(3)], Categorical())
    space = Space(Features(), radius=None)
    calibrated = dapcal.calibrate(posterior, train=train, held_out=held_out, distance=space)
    assert not calibrated(train[0]).distance.any()


def test_threads_catch_what_is_their_own():
    """They take turns so often that one runs while another is half way through adding its hook."""
    before = sys.getswitchinterval()
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    found: dict[int, list[float]] = {}
    start = threading.Barrier(4)

    def run(number: int) -> None:
        start.wait()
        found[number] = [float(layer_input(network, "0", torch.full((1, 2), float(number)))[0, 0]) for _ in range(50)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert found == {number: [float(number)] * 50 for number in range(4)}


def test_hooks_are_gone_after_an_error():
    layer = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="stop"), entering({"it": layer}, lambda name, z: None):
        raise RuntimeError("stop")
    assert not layer._forward_pre_hooks


def test_a_layer_that_runs_twice_is_refused():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x))

    with pytest.raises(ValueError, match="to run once in a forward pass, it ran 2 times"):
        layer_input(Twice(), "layer", torch.zeros(3, 2))


@pytest.mark.parametrize("members", [True, False])
def test_features_of_a_copy_of_the_members_need_no_pass_of_their_own(images, members, tmp_path):
    train, held_out = images
    posterior = ensemble.of([Counted() for _ in range(3)], Categorical())
    spaces = (Space(Features(members=members), name="features"), Space(Features(members=members, unit=True)))
    measured = measure(spaces, posterior, train[0], Evaluated(*held_out, seen(posterior, held_out[0])))
    copy = replace(posterior, likelihood=Categorical(2.0), draws=posterior.draws.clone())
    calibrated = dapcal.calibrate(copy, train=train, held_out=held_out, distance=measured)
    before = calibrated(held_out[0])
    assert runs(lambda: calibrated(held_out[0])) == 3
    again = replace(calibrated, posterior=replace(copy, draws=copy.draws.flip(0) + 0.1), before=copy)
    assert runs(lambda: again(held_out[0])) == 6
    again.save(tmp_path / "it.dap")
    loaded = dapcal.load(tmp_path / "it.dap", Counted())
    assert runs(lambda: loaded(held_out[0])) == 6
    assert torch.equal(loaded(held_out[0]).pre_distance, before.pre_distance)


def test_features_of_other_members_are_their_own(images):
    train, held_out = images
    one, two = (ensemble.of([Counted() for _ in range(3)], Categorical()) for _ in range(2))
    spaces = (Space(Features(members=True), name="features"), Space(Features(members=True, unit=True)))
    measured = measure(spaces, one, train[0], Evaluated(*held_out, seen(one, held_out[0])))
    calibrated = dapcal.calibrate(two, train=train, held_out=held_out, distance=measured)
    assert torch.equal(calibrated(held_out[0]).pre_distance, measured.distance(held_out[0]))
    assert runs(lambda: calibrated(held_out[0])) == 6


def test_members_features_are_put_side_by_side_once_for_all_who_ask(generator):
    x, y = torch.randn(60, 4, generator=generator), torch.arange(60) % 3

    def make():
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    posterior = ensemble.fit(make, Categorical(), (x, y), members=2, epochs=1)
    one, other, unit = (Features(members=True, unit=u).fit_projector(x, posterior) for u in (False, False, True))
    alone = [projector(x) for projector in (one, other, unit)]
    scaled = replace(one, scale=2 * one.scale)
    with shared(posterior.network, x):
        together = [projector(x) for projector in (one, other, unit)]
        assert together[0] is together[1]
        torch.testing.assert_close(scaled(x), alone[0] / 2)
        assert one(x.clone()) is not together[0]
    for found, expected in zip(together, alone, strict=True):
        assert torch.equal(found, expected)
