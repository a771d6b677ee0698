"""How little the classes of a network are activated: the energy score, of which posteriors, stored and deployed."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import dapcal
from dapcal.detectors import logits
from dapcal.distances import Activation, Features
from dapcal.distances.activation import activation_of
from dapcal.distances.choosing import informative
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian
from dapcal.posteriors import ensemble, laplace

N = 240


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(N) % 3
    center = 4 * torch.nn.functional.one_hot(y, 3).float()
    x = torch.rand(N, 3, generator=generator) + center
    return (x[:160], y[:160]), (x[160:], y[160:])


class Bumps(nn.Module):
    """A network whose logits are large near what it knows, and small elsewhere, as of a wide ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(3, 3)
        nn.init.eye_(self.scale.weight)
        nn.init.eye_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x):
        known = 4 * torch.eye(3) + 0.5
        return self.head(8 * torch.exp(-0.2 * torch.cdist(self.scale(x), known) ** 2))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.fixture(scope="module")
def members(data):
    return ensemble.fit(mlp, Categorical(), data[0], members=3, epochs=3, batch_size=64, learning_rate=1e-2)


def test_it_is_the_energy_score_of_one_network(data):
    network = Bumps()
    posterior = laplace.last_layer(network, Categorical(), data[0])
    projector = Features().fit_projector(data[0][0], posterior)
    metric = activation_of(posterior, projector, data[0][0][:2])
    assert metric is not None
    x = data[1][0]
    torch.testing.assert_close(metric(projector(x)), logits.energy(network)(x), rtol=1e-5, atol=1e-5)
    assert metric.joint(projector(x)) == metric(projector(x)).max()
    torch.testing.assert_close(metric(projector(x)[:5]), metric(projector(x))[:5])


def test_of_members_it_is_the_mean_over_their_energies(data, members):
    x = data[1][0]
    projector = Features(members=True).fit_projector(data[0][0], members)
    metric = activation_of(members, projector, x[:2])
    assert metric is not None
    expected = -members.outputs(x).logsumexp(-1).mean(0)
    torch.testing.assert_close(metric(projector(x)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3), nn.LogSoftmax(-1)),
        nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3), nn.Softplus()),
    ],
)
def test_outputs_that_are_not_linear_in_the_features_have_none(data, network):
    posterior = ensemble.of([network], Categorical())
    assert activation_of(posterior, Features().fit_projector(data[0][0], posterior), data[0][0][:2]) is None


def test_averaged_or_normalised_features_have_none(data, members):
    projector = Features(unit=True).fit_projector(data[0][0], members)
    assert activation_of(members, projector, data[0][0][:2]) is None


def test_a_layer_without_bias(data):
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3, bias=False))
    posterior = ensemble.of([network], Categorical())
    projector = Features().fit_projector(data[0][0], posterior)
    metric = activation_of(posterior, projector, data[0][0][:2])
    assert metric is not None
    torch.testing.assert_close(metric(projector(data[1][0])), logits.energy(network)(data[1][0]))


@pytest.fixture(scope="module")
def calibrated(data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dapcal.DapcalWarning)
        return dapcal.calibrate(Bumps(), Categorical(), train=data[0], held_out=data[1], candidates=8)


def test_where_it_tells_outliers_it_is_a_piece_of_evidence(calibrated, data):
    assert "logits" in calibrated(data[1][0]).evidence
    assert "logits" not in [space.name for space in calibrated.distance.spaces]
    lost = calibrated(torch.full((1, 3), -20.0)).evidence["logits"]
    assert lost.standardised.item() > 1
    assert lost.p_value.item() < 0.05


def test_it_is_stored_and_deployed(calibrated, data, tmp_path):
    x = torch.cat([data[1][0], 10 * data[1][0]])
    calibrated.save(tmp_path / "a.dap")
    loaded = dapcal.load(tmp_path / "a.dap", Bumps())
    assert isinstance(loaded.evidence.further[-1].metric, Activation)
    torch.testing.assert_close(loaded(x).ood_score, calibrated(x).ood_score)
    torch.testing.assert_close(calibrated.module()(x).ood_score, calibrated(x).ood_score, rtol=1e-5, atol=1e-5)


def test_where_outliers_have_larger_logits_it_is_out(data):
    network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        network[2].weight.abs_().mul_(10)  # logits grow with the inputs
    posterior = ensemble.of([network], Categorical())
    held_out = dapcal.data.Labelled(*data[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dapcal.DapcalWarning)
        found = informative(posterior, data[0][0], held_out, targets=data[0][1])
    (told,) = [note for note in found.notes if note.startswith("activation of the classes")]
    assert "out: noise outliers are nearer" in told
    assert "logits" not in [space.name for space in found.further]


@pytest.mark.parametrize(("likelihood", "outputs"), [(Bernoulli(), 1), (Gaussian(1.0), 2)])
def test_other_likelihoods_have_none(data, likelihood, outputs):
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs))
    posterior = laplace.last_layer(network, Gaussian(1.0), (data[0][0], torch.randn(160, outputs)))
    posterior = dapcal.posteriors.ensemble.of([posterior.network], likelihood)
    y = torch.arange(80) % 2 if outputs == 1 else torch.randn(80, 2, generator=torch.Generator().manual_seed(0))
    held_out = dapcal.data.Labelled(data[1][0], y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dapcal.DapcalWarning)
        found = informative(posterior, data[0][0], held_out)
    assert not any("activation" in note for note in found.notes)
