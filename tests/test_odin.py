"""ODIN against finite differences, a loop over its grid, and scikit-learn's AUROC."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score, roc_curve
from torch import nn

from dapcal.detectors import logits, odin
from detector_cases import blobs, cnn, images, mlp, trained


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return trained(mlp(), *blobs(150)).double().eval()


def held_out(n: int = 60):
    x, y = blobs(n, seed=1)
    return x.double(), y


@pytest.mark.parametrize("temperature", [1.0, 1000.0])
def test_direction_is_the_sign_of_finite_differences(network, temperature):
    x, step = held_out(20)[0], 1e-5

    def log_max(x):
        with torch.no_grad():
            return (network(x) / temperature).log_softmax(-1).max(-1).values

    slopes = torch.stack(
        [(log_max(x + step * e) - log_max(x - step * e)) / (2 * step) for e in torch.eye(2).double()], 1
    )
    found = odin.towards_prediction(network, x, temperature)
    clear = slopes.abs() > 1e-7 / temperature
    assert clear.float().mean() > 0.9
    assert torch.equal(found[clear], slopes.sign()[clear])


def test_direction_survives_a_saturated_softmax(network):
    x = held_out(20)[0]
    steep = nn.Sequential(network, nn.Linear(3, 3, bias=False)).double()
    with torch.no_grad():
        steep[1].weight.copy_(200 * torch.eye(3))
    assert ((steep(x) / 1.0).softmax(-1).max(-1).values == 1).all()
    torch.testing.assert_close(odin.towards_prediction(steep, x, 200.0), odin.towards_prediction(network, x, 1.0))
    assert (odin.towards_prediction(steep, x, 1.0) != 0).all()


def test_score_is_the_formula(network):
    x = held_out()[0]
    detector = odin.fit(network, held_out(), temperatures=(10.0,), epsilons=(0.05,))
    leaf = x.clone().requires_grad_()
    (network(leaf) / 10).log_softmax(-1).max(-1).values.sum().backward()
    moved = x - 0.05 * torch.sign(-leaf.grad)
    expected = 1 - (network(moved) / 10).softmax(-1).max(-1).values
    torch.testing.assert_close(detector(x), expected.detach())


def test_no_step_at_temperature_one_is_max_softmax(network):
    x = held_out()[0]
    detector = odin.fit(network, held_out(), temperatures=(1.0,), epsilons=(0.0,))
    torch.testing.assert_close(detector(x), logits.max_softmax(network)(x))


def test_the_best_pair_of_the_grid_is_chosen(network):
    x, outliers = held_out()[0], 3 * held_out(50)[0].flip(0) + 0.3
    temperatures, epsilons = (1.0, 5.0, 100.0), (0.0, 0.1, 0.4)
    found = odin.fit(network, held_out(), outliers, temperatures=temperatures, epsilons=epsilons)
    labels = np.repeat([0, 1], [60, 50])
    areas, rates = {}, {}
    for t in temperatures:
        for e in epsilons:
            one = odin.Odin(network, t, e, 0.0, 0.0)
            scores = np.concatenate([one(x), one(outliers)])
            areas[t, e] = roc_auc_score(labels, scores)
            accepted, kept, _ = roc_curve(1 - labels, -scores, drop_intermediate=False)
            rates[t, e] = accepted[kept >= 0.95][0]
    best = min(areas, key=lambda pair: (-round(areas[pair], 12), rates[pair], pair[1], pair[0]))
    assert (found.temperature, found.epsilon) == best
    assert found.auroc == pytest.approx(areas[best])
    assert found.false_positive_rate == pytest.approx(rates[best])
    assert len(set(areas.values())) > 3


def test_ties_go_to_the_smallest_step_and_temperature(network):
    outliers = torch.zeros(10, 2).double()  # all the same, in the middle of the classes: told apart by every pair
    found = odin.fit(network, held_out(), outliers, temperatures=(300.0, 2.0, 10.0), epsilons=(0.02, 0.01))
    assert found.auroc == 1
    assert (found.temperature, found.epsilon) == (2.0, 0.01)


def test_equal_areas_go_to_the_smaller_false_positive_rate(monkeypatch, network):
    monkeypatch.setattr(odin, "auroc", lambda far, near: 0.5)
    rates = iter([0.4, 0.2, 0.2, 0.3])
    monkeypatch.setattr(odin, "false_positive_rate", lambda far, near: next(rates))
    found = odin.fit(network, held_out(), temperatures=(1.0, 2.0), epsilons=(0.1, 0.2))
    assert (found.temperature, found.epsilon, found.false_positive_rate) == (2.0, 0.1, 0.2)


def test_default_grid_and_outliers(network):
    np.testing.assert_allclose(odin.EPSILONS, np.arange(0.001, 0.5, 0.017))
    assert list(odin.TEMPERATURES) == [1, 10, 100, 300, 500, 1000]
    first, again = (odin.fit(network, held_out(30)) for _ in range(2))
    assert first.epsilon in odin.EPSILONS
    assert first.temperature in odin.TEMPERATURES
    assert (first.temperature, first.epsilon, first.auroc) == (again.temperature, again.epsilon, again.auroc)


def test_noise_fills_the_range(generator):
    pictures = images(40)[0]
    noise = odin._noise(pictures, 500, generator)
    assert noise.shape == (500, 1, 8, 8)
    assert noise.min().item() == pytest.approx(pictures.min().item(), abs=1e-3)
    assert noise.max().item() == pytest.approx(pictures.max().item(), abs=1e-3)
    table = torch.tensor([[0.0, 100.0], [1.0, 300.0]])
    noise = odin._noise(table, 500, generator)
    assert (noise >= table[0]).all()
    assert (noise <= table[1]).all()
    torch.testing.assert_close(noise.mean(0), table.mean(0), rtol=0.05, atol=0)


def test_at_most_so_many_inputs_choose(monkeypatch, network):
    sizes = []
    original = odin._grid
    monkeypatch.setattr(odin, "_grid", lambda network, x, *rest: sizes.append(len(x)) or original(network, x, *rest))
    odin.fit(network, held_out(60), temperatures=(1.0,), epsilons=(0.1,), most=25)
    odin.fit(network, held_out(60), torch.randn(70, 2).double(), temperatures=(1.0,), epsilons=(0.1,), most=40)
    assert sizes == [25, 25, 40, 40]


def test_one_gradient_a_temperature(monkeypatch, network):
    calls = []
    original = odin.towards_prediction
    monkeypatch.setattr(odin, "towards_prediction", lambda n, x, t: calls.append(t) or original(n, x, t))
    odin.fit(network, held_out(), temperatures=(1.0, 2.0), epsilons=(0.0, 0.1, 0.2), batch_size=30)
    assert sorted(calls) == [1.0] * 4 + [2.0] * 4  # two batches of held-out inputs, two of outliers


def test_a_convolutional_network_in_half_the_batches():
    torch.manual_seed(0)
    x, y = images(60)
    network = trained(cnn(), x, y)
    few = odin.fit(network, (x, y), temperatures=(1.0, 10.0), epsilons=(0.0, 0.05), batch_size=16)
    all_at_once = odin.fit(network, (x, y), temperatures=(1.0, 10.0), epsilons=(0.0, 0.05))
    assert (few.temperature, few.epsilon) == (all_at_once.temperature, all_at_once.epsilon)
    torch.testing.assert_close(few(x), all_at_once(x), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperatures": ()}, "`temperatures` > 0"),
        ({"temperatures": (0.0,)}, "`temperatures` > 0"),
        ({"epsilons": (-0.1,)}, "`epsilons` >= 0"),
        ({"outliers": torch.zeros(3, 5).double()}, "`outliers` with inputs of shape"),
    ],
)
def test_refuses(network, options, message):
    with pytest.raises(ValueError, match=message):
        odin.fit(network, held_out(), **options)


def test_refuses_inputs_that_cannot_move(network):
    with pytest.raises(ValueError, match=r"which ODIN can move, got torch\.int64; use another detector"):
        odin.fit(network, (torch.ones(4, 2, dtype=torch.long), torch.zeros(4, dtype=torch.long)))
