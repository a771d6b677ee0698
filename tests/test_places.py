"""A class at every place: the same as as many inputs of one class each, with one distance for all of them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import dapcal
from dapcal.adjust import Inflate
from dapcal.data import Labelled
from dapcal.ensembles import base_ensemble, seen
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian, PerPlace
from dapcal.models.subject import Subject
from dapcal.posteriors import ensemble, laplace
from dapcal.posteriors.predictions import StackedPredictions

pytestmark = pytest.mark.filterwarnings("ignore::dapcal.types.DapcalWarning")

S, N, K, PLACES = 3, 4, 3, (2, 5)
IGNORE = 255


def drawn(each=None, outputs: int = K) -> tuple[PerPlace, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    maps = 2 * torch.randn(S, N, outputs, *PLACES, generator=generator)
    y = torch.randint(max(outputs, 2), (N, *PLACES), generator=generator)
    y[0, 0, 0] = y[2, 1, 3] = IGNORE
    return PerPlace(each or Categorical(1.4), PLACES, IGNORE), maps, y


@pytest.mark.parametrize(("each", "outputs"), [(Categorical(1.4), 3), (Bernoulli(0.8), 1)])
@pytest.mark.parametrize("d", [0.0, 2.0])
def test_places_are_inputs_of_their_own(each, outputs, d):
    own, maps, y = drawn(each, outputs)
    apart = maps.movedim(2, -1).flatten(1, -2)  # (S, N·P, k)

    def at(likelihood, z: Tensor):
        count = z.shape[1]
        return Inflate()(StackedPredictions(lambda _: z, likelihood), torch.zeros(count, 1))(torch.full((count,), d))

    whole, single = at(own, maps.flatten(2)), at(each, apart)
    mean = each.mean(single).unflatten(0, (N, *PLACES)).movedim(-1, 1)
    torch.testing.assert_close(own.mean(whole), mean)
    torch.testing.assert_close(own.variance(whole).flatten(), each.variance(single))
    torch.testing.assert_close(own.entropy(whole), each.entropy(single).reshape(N, -1).sum(1))
    torch.testing.assert_close(own.expected_entropy(whole), each.expected_entropy(single).reshape(N, -1).sum(1))
    counts = y.flatten() != IGNORE
    label = y.flatten().where(counts, 0)
    density = each.log_prob(single, label).where(counts, 0).reshape(N, -1).sum(1)
    torch.testing.assert_close(own.log_prob(whole, y), density)
    wrong = (each.error(single, label) & counts).reshape(N, -1).double().sum(1) / counts.reshape(N, -1).sum(1)
    torch.testing.assert_close(own.error(whole, y), wrong)
    given = each.log_likelihood(apart, label).where(counts, 0).reshape(S, N, -1).sum(-1)
    torch.testing.assert_close(own.log_likelihood(maps.flatten(2), y), given)
    decided = own.decisions(own.mean(whole), y)
    torch.testing.assert_close(decided.probs, each.mean(single)[counts])
    assert torch.equal(decided.y, label[counts])


def test_classes_may_come_last():
    own, maps, y = drawn()
    last = PerPlace(own.each, PLACES, IGNORE, classes_last=True)
    one, two = base_ensemble(own, maps.flatten(2)), base_ensemble(last, maps.movedim(2, -1).flatten(2))
    torch.testing.assert_close(last.mean(two), own.mean(one).movedim(1, -1))
    torch.testing.assert_close(last.log_prob(two, y), own.log_prob(one, y))
    torch.testing.assert_close(last.location_variance(two.outputs), own.location_variance(one.outputs))
    torch.testing.assert_close(last.confidence(last.mean(two)), own.confidence(own.mean(one)))
    torch.testing.assert_close(last.decisions(last.mean(two), y).probs, own.decisions(own.mean(one), y).probs)


@pytest.mark.parametrize("last", [False, True])
def test_curvature_is_the_hessian(last):
    own, maps, y = drawn()
    own = PerPlace(own.each, PLACES, classes_last=last)
    z = maps[0].flatten(1).double()
    root = own.curvature_root(z)
    hessian = torch.autograd.functional.hessian(lambda one: -own.log_likelihood(one[None], y[[1]]).sum(), z[1])
    torch.testing.assert_close(root[1] @ root[1].T, hessian)
    with pytest.raises(ValueError, match=r"A curvature of 3000 outputs .*ensemble\.of\(networks, likelihood\)"):
        PerPlace(Categorical(), (10, 100)).curvature_root(torch.zeros(1, 3000))


@functools.cache
def problem(n: int = 60):
    """Two networks that find the brighter half of an image, place by place."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x = torch.randn(2 * n, 1, 4, 5)
        y = (nn.functional.avg_pool2d(x, 3, 1, 1)[:, 0] + 0.1 * torch.randn(2 * n, 4, 5) > 0).long()
        y[:, 0, 0] = IGNORE
        networks = []
        for _ in range(2):
            maps = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))
            optimizer = torch.optim.Adam(maps.parameters(), 0.05)
            for _ in range(40):
                loss = nn.functional.cross_entropy(maps(x[:n]), y[:n], ignore_index=IGNORE)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            networks.append(nn.Sequential(maps, nn.Flatten()))
    return networks, (x[:n], y[:n]), (x[n:], y[n:])


def test_an_ensemble_of_maps_is_calibrated(tmp_path):
    networks, train, held_out = problem()
    likelihood = PerPlace(Categorical(), (4, 5), IGNORE)
    own = dapcal.calibrate(ensemble.of(networks, likelihood), train=train, held_out=held_out, guard=0.2)
    assert own.summary().calibrated.accuracy > 0.8
    far = torch.cat([held_out[0][:3], 20 * torch.randn(2, 1, 4, 5)])
    prediction = own(far)
    assert prediction.distance.shape == (5,)
    assert prediction.probs.shape == (5, 2, 4, 5)
    torch.testing.assert_close(prediction.probs.sum(1), torch.ones(5, 4, 5))
    assert prediction.ood_p_value[3:].max() < 0.05
    columns = prediction.columns()
    assert columns["prediction"].shape == columns["epistemic"].shape == (5, 4, 5)
    assert prediction[1:3].mean.shape == (2, 2, 4, 5)
    assert prediction.sample(2).shape == (2, 5, 4, 5)
    own.save(tmp_path / "m.dap")
    again = dapcal.load(tmp_path / "m.dap", networks[0])
    assert again.posterior.likelihood == own.posterior.likelihood
    assert torch.equal(again(far).mean, prediction.mean)
    assert torch.equal(own.predict(far, batch_size=2).mean, prediction.mean)
    with pytest.raises(TypeError, match=r"likelihoods .* got PerPlace; predict with calibrated\(x\)"):
        own.module()
    with pytest.raises(ValueError, match="PerPlace has one for every place; look at"):
        Subject(own, Labelled(*train), Labelled(*held_out), "m", "maps", show=lambda x: [])


def test_a_small_network_of_maps_has_a_laplace_approximation():
    networks, train, held_out = problem()
    likelihood = PerPlace(Categorical(), (4, 5), IGNORE)
    posterior = laplace.fit(networks[0], likelihood, train, structure=laplace.Diagonal, prior_scale=0.5, draws=300)
    x = held_out[0][:2]
    closed, many = (likelihood.mean(seen(posterior, x, drawn=drawn)) for drawn in (False, True))
    torch.testing.assert_close(closed, many, atol=0.05, rtol=0)


def test_maps_that_do_not_fit():
    own = PerPlace(Categorical(), PLACES)
    with pytest.raises(ValueError, match=r"a class for every place, \(4, 2, 5\), got \(4, 10\)"):
        own.check(torch.zeros(4, 30), torch.zeros(4, 10))
    with pytest.raises(ValueError, match="K classes at 2 × 5 places, flattened, got 31; check `places`"):
        own.check(torch.zeros(4, 31), torch.zeros(4, 2, 5))
    with pytest.raises(ValueError, match="between 0 and 2"):
        own.check(torch.zeros(4, 30), torch.full((4, 2, 5), 255))
    with pytest.raises(TypeError, match=r"targets of Gaussian\(\) as y.flatten\(1\)"):
        PerPlace(Gaussian(), PLACES)
    with pytest.raises(ValueError, match="`places` as sizes >= 1"):
        PerPlace(Categorical(), ())
    networks, train, held_out = problem()
    with pytest.raises(ValueError, match=r"nn.Flatten\(\), with dapcal.likelihoods.PerPlace"):
        dapcal.calibrate(networks[0][0], PerPlace(Categorical(), (4, 5)), train=train, held_out=held_out)
    with pytest.raises(ValueError, match=r"PerPlace\(Categorical\(\), places=\(4, 5\)\)"):
        dapcal.calibrate(networks[0], train=train, held_out=held_out)
    base = base_ensemble(own, torch.zeros(2, 4, 30))
    assert own.most_uncertain(base) == pytest.approx(1 / 3)
