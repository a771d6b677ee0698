"""No adjustment: predictions are those of the base posterior, distances and the OOD score are there all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import dapcal
from cases import doubles
from dapcal.adjust import Inflate, Unchanged
from dapcal.calibration.scales import Exp, ScaledSigmoid
from dapcal.distances import Space
from dapcal.distances.projectors import Identity
from dapcal.likelihoods import Gaussian
from dapcal.posteriors import laplace, samples

SPACE = Space(Identity(), radius=0.5, name="inputs")


@pytest.fixture
def data(generator):
    x = torch.randn(200, 2, generator=generator)
    return (x[:100], x[:100, :1].sin()), (x[100:], x[100:, :1].sin())


def lines(generator):
    stacked = {"weight": torch.randn(6, 1, 2, generator=generator), "bias": torch.randn(6, 1, generator=generator)}
    return samples.from_stacked(nn.Linear(2, 1), Gaussian(0.5), stacked)


def calibrate(posterior, data, **options):
    return dapcal.calibrate(posterior, train=data[0], held_out=data[1], distance=SPACE, **options)


def test_predictions_stay_and_distances_are_those_of_the_radius(data, generator):
    posterior = lines(generator)
    calibrated = calibrate(posterior, data, adjust=Unchanged())
    inflated = replace(calibrated, adjust=Inflate())
    far = 30 + torch.randn(20, 2, generator=generator)
    prediction, expected = calibrated(far), inflated(far)
    assert calibrated.factor == 1
    assert torch.equal(prediction.distance, prediction.pre_distance)
    assert (prediction.distance > 1).all()
    assert torch.equal(prediction.variance, prediction.base.variance)
    assert (expected.variance > prediction.variance).all()
    assert torch.equal(prediction.mean, expected.base.mean)
    assert torch.equal(prediction.ood_p_value, expected.ood_p_value)
    assert torch.equal(calibrated.joint(far).variance, prediction.variance)


def test_it_comes_back_from_a_file(data, generator, tmp_path):
    calibrated = calibrate(lines(generator), data, adjust=Unchanged())
    calibrated.save(tmp_path / "model.dap")
    again = dapcal.load(tmp_path / "model.dap", nn.Linear(2, 1))
    assert again.adjust == Unchanged()
    far = torch.full((3, 2), 30.0)
    assert torch.equal(again(far).variance, calibrated(far).variance)


def test_it_deploys(data, generator):
    calibrated = calibrate(lines(generator), data, adjust=Unchanged())
    x = 5 * torch.randn(9, 2, generator=generator)
    deployed, expected = calibrated.module()(x), calibrated(x)
    torch.testing.assert_close(deployed.variance, expected.variance)
    torch.testing.assert_close(deployed.distance, expected.distance)


def test_a_joint_prediction_of_a_closed_form_asks_for_draws(data):
    network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    posterior = laplace.last_layer(network, Gaussian(0.5), data[0])
    with pytest.raises(ValueError, match="A joint prediction needs draws, and the closed form of Unchanged"):
        calibrate(posterior, data, adjust=Unchanged()).joint(data[0][0][:4])
    drawn = calibrate(posterior, data, adjust=Unchanged(drawn=True))
    assert torch.equal(drawn.joint(data[0][0][:4]).mean, drawn(data[0][0][:4]).mean)


@pytest.mark.parametrize(("scale", "factor"), [(Exp(), 1.0), (ScaledSigmoid(4.0), 1.0), (ScaledSigmoid(0.5), 0.25)])
def test_the_factor_is_one_where_the_scale_reaches_it(data, generator, scale, factor):
    calibrated = calibrate(lines(generator), data, adjust=Unchanged(), scale=scale)
    assert calibrated.factor == pytest.approx(factor)
    assert torch.equal(calibrated.curve.phi, doubles([calibrated.phi]))
    assert calibrated.curve.guard == pytest.approx(calibrated.curve.base_nll + 0.01)
