"""Features of all members of an ensemble, side by side: against each member alone, in one pass, stored, deployed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import dapcal
from dapcal.data import Labelled
from dapcal.deploy import export
from dapcal.distances import ClassGaussian, Space, informative, verdicts
from dapcal.distances.features import one_pass
from dapcal.distances.projectors import Features, LayerFeatures, MemberFeatures, project
from dapcal.likelihoods import Categorical
from dapcal.networks import layer_input, shared
from dapcal.posteriors import ensemble, samples, variational

pytestmark = pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")


class Counted(nn.Module):
    """A small convolutional network that counts how often it runs."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.runs += 1
        return self.head(self.body(x).relu())


class Normed(nn.Module):
    """A network of matrix products that is no chain: all draws run by `vmap`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x.flatten(1))
        return self.head(self.norm(h).tanh() + h)


def chain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3))


KINDS = {"one by one": (Counted, "head"), "vmap": (Normed, "head"), "chain": (chain, "3")}


@pytest.fixture
def images(generator):
    def draw(n: int):
        y = torch.arange(n) % 3
        return torch.randn(n, 1, 8, 8, generator=generator) + y[:, None, None, None], y

    return draw(120), draw(90)


def of(make, members: int = 3):
    torch.manual_seed(0)
    networks = [make() for _ in range(members)]
    for network in networks:
        network(torch.randn(50, 1, 8, 8))  # statistics of its own
    return ensemble.of([network.eval() for network in networks], Categorical()), networks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", [False, True])
def test_they_are_those_of_each_member_in_units_of_its_spread(images, kind, unit):
    make, layer = KINDS[kind]
    posterior, networks = of(make)
    x = torch.cat([images[0][0]] * 5)  # more than a batch
    projector = Features(unit=unit, members=True).fit_projector(x, posterior)
    found = project(projector, x).unflatten(1, (3, 8))
    for place, network in enumerate(networks):
        alone = layer_input(network, layer, x)
        alone = nn.functional.normalize(alone) if unit else alone
        spread = (alone - alone.mean(0)).square().sum(1).mean().sqrt()
        torch.testing.assert_close(found[:, place], alone / (spread * 3**0.5), rtol=1e-4, atol=1e-5)
    assert float(found.var(0, correction=0).sum()) == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_shared_is_what_a_pass_of_its_own_gives(images, kind):
    make, _ = KINDS[kind]
    posterior, _ = of(make)
    x = images[0][0]
    projector = Features(members=True).fit_projector(x, posterior)
    alone, outputs = project(projector, x), posterior.outputs(x)
    with one_pass([projector], posterior).over(x):
        assert torch.equal(posterior.outputs(x), outputs)
        assert torch.equal(project(projector, x), alone)


SPACES = (
    Space(Features(members=True), name="features"),
    Space(Features(members=True, unit=True), name="normalised"),
    Space(Features(members=True, unit=True), ClassGaussian(), name="classes"),
)


def calibrated_on(images, posterior, distance=SPACES):
    train, held_out = images
    return dapcal.calibrate(posterior, train=train, held_out=held_out, distance=distance)


@pytest.mark.parametrize("distance", [SPACES, None, (*SPACES, Space(Features(), name="of the first"))])
def test_an_ensemble_of_m_predicts_with_m_passes(images, distance):
    calibrated = calibrated_on(images, of(Counted, 4)[0], distance)
    Counted.runs = 0
    calibrated(images[1][0])
    assert Counted.runs == 4


def test_training_inputs_stay_at_distance_zero(images):
    calibrated = calibrated_on(images, of(Counted)[0], Space(Features(members=True), radius=None))
    assert not calibrated(images[0][0]).distance.any()


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_stored_once_and_deployed(images, kind, tmp_path):
    make, _ = KINDS[kind]
    calibrated = calibrated_on(images, of(make)[0])
    x = 1.5 * images[1][0]
    expected = calibrated(x)
    calibrated.save(tmp_path / "model.dap")
    stored = dapcal.artifact.open(tmp_path / "model.dap")
    assert len([name for name in stored.tensors if name.endswith("posterior.draws")]) == 1
    loaded = dapcal.load(tmp_path / "model.dap", make())
    assert all(space.projector.posterior is loaded.posterior for space in loaded.distance.spaces)
    assert torch.equal(loaded(x).mean, expected.mean)
    assert torch.equal(loaded(x).ood_score, expected.ood_score)
    moved = loaded.to("cpu")
    assert all(space.projector.posterior is moved.posterior for space in moved.distance.spaces)
    programs = [calibrated.module()(x)._asdict()]
    if kind == "one by one":  # tracing takes seconds; test_deploy.py has the others
        programs.append(export(calibrated).module()(x))
    for found in programs:
        for name in ("mean", "distance", "ood_score"):
            torch.testing.assert_close(found[name], getattr(expected, name), rtol=1e-3, atol=1e-4)


def test_members_that_were_trained_again_leave_features_with_the_old_ones(images, tmp_path):
    old = calibrated_on(images, of(Counted)[0])
    new = replace(old, posterior=replace(old.posterior, draws=old.posterior.draws + 0.01))
    x = 1.5 * images[1][0]
    assert torch.equal(new(x).pre_distance, old(x).pre_distance)
    assert not torch.equal(new(x).mean, old(x).mean)
    Counted.runs = 0
    new(x)
    assert Counted.runs == 6  # new ones and old ones, each once
    new.save(tmp_path / "model.dap")
    loaded = dapcal.load(tmp_path / "model.dap", Counted())
    assert torch.equal(loaded(x).mean, new(x).mean)
    assert torch.equal(loaded(x).ood_score, new(x).ood_score)
    torch.testing.assert_close(new.module()(x).distance, new(x).distance, rtol=1e-3, atol=1e-4)


def test_the_default_looks_at_members_where_there_are_some(images, monkeypatch):
    monkeypatch.setattr(verdicts, "THRESHOLD", 0.0)
    monkeypatch.setattr(verdicts, "NEARER", 1.0)
    (x, y), held_out = images
    posterior, _ = of(chain)

    def projectors(own):
        judged = informative(own, x, Labelled(*held_out), targets=y)
        return [s.projector for s in (*judged.distance.spaces, *judged.further)]

    assert any(isinstance(p, MemberFeatures) for p in projectors(posterior))
    assert not any(isinstance(p, LayerFeatures) for p in projectors(posterior))
    mean = variational.fit(chain(), Categorical(), (x, y), epochs=1, draws=4)
    assert not any(isinstance(p, MemberFeatures) for p in projectors(mean))


def test_members_that_share_their_features_count_once(images, generator):
    """Draws of a head alone."""
    (x, y), held_out = images
    network = chain()
    states = [{n: t.clone() for n, t in network.state_dict().items()} for _ in range(3)]
    for state in states:
        state["3.weight"] += torch.randn(3, 8, generator=generator)
    judged = informative(samples.from_state_dicts(network, Categorical(), states), x, Labelled(*held_out), targets=y)
    assert not any(isinstance(space.projector, MemberFeatures) for space in judged.distance.spaces)


def test_other_posteriors_are_refused(images):
    (x, y), _ = images
    mean = variational.fit(chain(), Categorical(), (x, y), epochs=1, draws=4)
    many, _ = of(chain, 33)
    for posterior in (mean, many):
        with pytest.raises(ValueError, match=r"an ensemble of 2 to 32 networks .* use Features\(\)"):
            Features(members=True).fit_projector(x, posterior)


def test_a_layer_that_runs_twice_is_refused(images):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x.flatten(1)))

    posterior, _ = of(Twice)
    with pytest.raises(ValueError, match="Expected layer `layer` to run once in a forward pass"):
        posterior.layer_inputs("layer", images[0][0])
    with shared(posterior.network, images[0][0], (), ["layer"]):
        assert posterior.outputs(images[0][0]).shape == (3, 120, 64)
