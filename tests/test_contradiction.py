"""Data that contradict the network are told; weak and unbalanced ones are not."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import dapcal
from dapcal.data import Labelled
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, MultiLabel, Poisson
from dapcal.posteriors.contradiction import contradiction
from dapcal.types import DapcalWarning


def data(n: int = 400, classes: int = 4, noise: float = 0.3, common: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, classes in order along a line, and the number on that line."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 5, generator=generator)
    score = x[:, 0] + 0.5 * x[:, 1] + noise * torch.randn(n, generator=generator)
    y = torch.bucketize(score, torch.linspace(-1, 1, classes - 1) + common)
    return x, y, score[:, None]


def trained(x: Tensor, y: Tensor, outputs: int, steps: int = 200) -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, outputs))
    loss = nn.functional.mse_loss if y.is_floating_point() else nn.functional.cross_entropy
    optimizer = torch.optim.Adam(network.parameters(), 0.01, weight_decay=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(network(x), y).backward()
        optimizer.step()
    return network.eval()


def told(network: nn.Module, likelihood: Likelihood, x: Tensor, y: Tensor) -> str:
    return contradiction(network.eval(), likelihood, Labelled(x, y))


@pytest.mark.parametrize("classes", [2, 4, 6])
@pytest.mark.parametrize("shift", [1, -1])
def test_shifted_labels(classes, shift):
    x, y, _ = data(n=800, classes=classes, noise=0.02)
    network = trained(x[:600], y[:600], classes)
    x, y = x[600:], y[600:]
    assert told(network, Categorical(), x, (y + shift) % classes).startswith("accuracy 0")
    assert told(network, Categorical(), x, y) == ""


def test_inputs_that_are_not_scaled_and_another_order_of_rows():
    x, y, score = data()
    network, line = trained(x[:200], y[:200], 4), trained(x[:200], score[:200], 1)
    raw = 50 * x + torch.tensor([-1000.0, 100, 3000, 700, 20])
    assert "commonest class alone" in told(network, Categorical(), raw, y)
    assert "deviation of the targets" in told(line, Gaussian(), raw, score)
    assert told(line, Gaussian(), x, score.roll(7, 0))
    assert told(line, Gaussian(), x, score) == ""


@pytest.mark.parametrize("unit", [lambda y: 1e4 * y, lambda y: 0.01 * y, lambda y: y + 50, lambda y: 1.8 * y + 32])
def test_another_unit(unit):
    x, _, score = data()
    network = trained(x, score, 1)
    error, deviation = (float(part.rsplit(" ", 1)[1]) for part in told(network, Gaussian(), x, unit(score)).split(","))
    assert error == pytest.approx(float((network(x) - unit(score)).detach().square().mean().sqrt()), rel=0.01)
    assert deviation == pytest.approx(float(unit(score).std()), rel=0.01)


def test_weak_networks_are_honest():
    """Little to be learnt: R² of 2 %, classes that are right a little more often than by chance."""
    x, y, score = data(n=3000, noise=8, classes=3)
    assert told(trained(x[:2000], score[:2000], 1, 40), Gaussian(), x[2000:], score[2000:]) == ""
    network = trained(x[:2000], y[:2000], 3, 40)
    assert float((network(x[2000:]).argmax(1) == y[2000:]).double().mean()) < 0.6
    assert told(network, Categorical(), x[2000:], y[2000:]) == ""


def test_unbalanced_classes_and_classes_with_weights():
    """One class has nearly all rows: no better in accuracy, or far worse where classes were weighted."""
    x, y, _ = data(n=2000, classes=2, common=3.0, noise=1.0)
    assert 0.02 < float(y.double().mean()) < 0.1
    network = trained(x[:1000], y[:1000], 2, 30)
    assert told(network, Categorical(), x[1000:], y[1000:]) == ""
    with torch.no_grad():
        network[-1].bias += torch.tensor([0.0, 4.0])
    assert float((network(x).argmax(1) == y).double().mean()) < 0.8
    assert told(network, Categorical(), x[1000:], y[1000:]) == ""


def test_other_likelihoods():
    x, y, _ = data(classes=2)
    logit = trained(x, y.double().float()[:, None], 1)  # of 0 and 1
    logit[-1].bias.data -= 0.5
    assert told(logit, Bernoulli(), x, y) == ""
    assert told(logit, Bernoulli(), x, 1 - y)
    both = nn.Sequential(logit, nn.Linear(1, 2))
    both[1].weight.data, both[1].bias.data = torch.ones(2, 1), torch.zeros(2)
    labels = torch.stack([y, y], 1)
    assert told(both, MultiLabel(), x, labels) == ""
    assert told(both, MultiLabel(), x, 1 - labels)
    logit[-1].weight.data *= 3  # now the log of a rate
    logit[-1].bias.data = 3 * logit[-1].bias.data - 1.5
    assert told(logit, Poisson(), x, y) == ""
    assert told(logit, Poisson(), 1e4 * x, y)


def test_few_rows_and_targets_that_are_all_the_same_say_nothing():
    x, y, score = data()
    network, line = trained(x, y, 4), trained(x, score, 1)
    assert told(network, Categorical(), x[:29], (y[:29] + 1) % 4) == ""
    assert told(network, Categorical(), x, torch.zeros_like(y)) == ""
    assert told(line, Gaussian(), x, torch.zeros_like(score)) == ""


def messages(network: nn.Module, train: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        dapcal.calibrate(network, train=train, held_out=held_out, candidates=3)
    here = [w for w in found if "no better than an answer without inputs" in str(w.message)]
    assert all(w.category is DapcalWarning and w.filename == __file__ for w in here)
    return [str(w.message) for w in here]


def test_calibrate_names_the_data_that_contradict():
    x, y, _ = data(classes=3)
    network = trained(x[:200], y[:200], 3)
    train, held_out = (x[:200], y[:200]), (x[200:], y[200:])
    shifted = (held_out[0], (held_out[1] + 1) % 3)
    assert messages(network, train, held_out) == []
    (message,) = messages(network, train, shifted)
    assert "on `held_out` (accuracy" in message
    assert "scaled and numbered as in training" in message
    (message,) = messages(network, (train[0], (train[1] + 1) % 3), shifted)
    assert "on `train` (accuracy" in message
    assert "and `held_out` (accuracy" in message


def test_calibrate_tells_an_untrained_network():
    x, _, score = data()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
    network[-1].bias.data += 1
    assert len(messages(network, (x[:200], score[:200]), (x[200:], score[200:]))) == 1
