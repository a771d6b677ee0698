"""Where calibration inputs come from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial import Delaunay

from dapcal.calibration.inputs import Around, Given, Hardest, Misclassified
from dapcal.data import Labelled
from dapcal.ensembles import evaluated
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.posteriors.predictions import StackedPredictions
from dapcal.types import DapcalWarning


def classes(wrong: int, n: int = 100):
    """Held-out data of which a given number are misclassified, by a varying margin."""
    y = torch.arange(n) % 3
    guess = torch.where(torch.arange(n) % (n // max(wrong, 1)) == 0, (y + 1) % 3, y) if wrong else y
    margin = 1 + torch.rand(n, 1, generator=torch.Generator().manual_seed(0))
    logits = margin * torch.nn.functional.one_hot(guess, 3)
    assert int((guess != y).sum()) == wrong
    posterior = StackedPredictions(lambda x: torch.stack([logits, logits + 0.1 * x[:, :1]]), Categorical())
    return posterior, Labelled(torch.arange(2.0 * n).reshape(n, 2) / n, y), guess != y


def test_given_inputs_are_taken_as_they_are(posterior):
    x, y = torch.randn(7, 2), torch.arange(7)
    chosen = Given(x, y)(posterior, None, None)
    assert chosen.x is x
    assert chosen.y is y
    assert chosen.origin == "7 given inputs"
    assert Given(x)(posterior, None, None).y is None


def test_around_lies_outside_the_convex_hull(generator):
    train = Labelled(torch.randn(300, 2, generator=generator), torch.zeros(300))
    chosen = Around(number=500)(None, train, None)
    hull = Delaunay(train.x.numpy())
    assert chosen.x.shape == (500, 2)
    assert chosen.y is None
    assert (hull.find_simplex(chosen.x.numpy()) < 0).mean() > 0.98  # three standard deviations
    assert "500 draws from 32 Gaussians outside the training domain" in chosen.origin
    distance = torch.cdist(chosen.x, train.x).min(1).values
    assert distance.max() < 1  # just outside


def test_around_default_centers_are_all_outside_the_hull(generator):
    train = Labelled(torch.rand(200, 3, generator=generator), torch.zeros(200))
    many = Around(number=64 * 400, directions=64)(None, train, None).x.reshape(400, 64, 3)
    centers = many.mean(0)  # to 0.1/√400
    assert (Delaunay(train.x.numpy()).find_simplex(centers.numpy()) < 0).all()
    np.testing.assert_allclose(many.std(0).numpy(), 0.1, rtol=0.2)


@pytest.mark.parametrize("deviation", [0.01, 0.5])
def test_around_given_centers(deviation):
    centers = torch.tensor([[5.0, 0.0], [0.0, -5.0], [3.0, 3.0]])
    train = Labelled(torch.zeros(4, 2), torch.zeros(4))
    x = Around(centers, deviation, number=3000)(None, train, None).x.reshape(1000, 3, 2)
    np.testing.assert_allclose(x.mean(0).numpy(), centers.numpy(), atol=4 * deviation / 1000**0.5)
    np.testing.assert_allclose(x.std(0).numpy(), deviation, rtol=0.1)


def test_around_keeps_shape_and_dtype_and_is_seeded():
    train = Labelled(torch.rand(50, 2, 3, dtype=torch.float64), torch.zeros(50))
    one, two, three = (Around(number=10, seed=seed)(None, train, None).x for seed in (0, 0, 1))
    assert one.shape == (10, 2, 3)
    assert one.dtype == torch.float64
    assert torch.equal(one, two)
    assert not torch.equal(one, three)


@pytest.mark.parametrize(("fraction", "number"), [(0.3, 30), (0.05, 5), (0.001, 1), (1.0, 100)])
def test_hardest_are_those_with_the_lowest_density(generator, fraction, number):
    outputs = torch.randn(5, 100, 1, generator=generator)
    y = torch.randn(100, 1, generator=generator)
    x = torch.randn(100, 2, generator=generator)
    posterior = StackedPredictions(lambda _: outputs, Gaussian(0.5))
    chosen = Hardest(fraction)(posterior, None, evaluated(posterior, Labelled(x, y)))
    mean, variance = outputs.double().mean(0), 0.25 + outputs.double().var(0, correction=0)
    density = torch.distributions.Normal(mean, variance.sqrt()).log_prob(y.double())[:, 0]
    worst = density.argsort()[:number]
    assert torch.equal(chosen.x, x[worst])
    assert torch.equal(chosen.y, y[worst])
    assert f"({number})" in chosen.origin
    assert f"{100 * fraction:.0f} %" in chosen.origin


@pytest.mark.parametrize("wrong", [10, 20])
def test_misclassified(wrong):
    posterior, held_out, where = classes(wrong)
    chosen = Misclassified()(posterior, None, evaluated(posterior, held_out))
    assert torch.equal(chosen.x, held_out.x[where])
    assert torch.equal(chosen.y, held_out.y[where])
    assert chosen.origin == f"{wrong} misclassified held-out inputs"


@pytest.mark.parametrize("wrong", [0, 5])
def test_too_few_misclassified_fall_back_to_the_hardest(wrong):
    posterior, held_out, where = classes(wrong)
    with pytest.warns(
        DapcalWarning, match=rf"Only {wrong} held-out inputs are misclassified \(at least 10 are wanted\)"
    ):
        chosen = Misclassified()(posterior, None, evaluated(posterior, held_out))
    hardest = Hardest(0.3)(posterior, None, evaluated(posterior, held_out))
    assert len(chosen.x) == 30
    assert torch.equal(chosen.x, hardest.x)
    assert chosen.origin == hardest.origin
    assert {tuple(row) for row in held_out.x[where].tolist()} <= {tuple(row) for row in chosen.x.tolist()}


def test_misclassified_in_regression_are_the_hardest(generator):
    outputs = torch.randn(5, 40, 1, generator=generator)
    held_out = Labelled(torch.randn(40, 2, generator=generator), torch.randn(40, 1, generator=generator))
    posterior = StackedPredictions(lambda _: outputs, Gaussian())
    seen = evaluated(posterior, held_out)
    assert torch.equal(Misclassified()(posterior, None, seen).x, Hardest()(posterior, None, seen).x)


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.5])
def test_hardest_refuses_a_fraction_out_of_range(fraction):
    with pytest.raises(ValueError, match="Expected `fraction`"):
        Hardest(fraction)
