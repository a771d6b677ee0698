"""Scales g(φ): positive, increasing, with an inverse."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.special import expit

from dapcal.calibration.scales import Exp, ScaledSigmoid, Softplus

SCALES = [Exp(), Softplus(), ScaledSigmoid(2.5)]
PHI = torch.linspace(-12, 12, 97, dtype=torch.float64)


@pytest.mark.parametrize(
    ("scale", "formula"),
    [
        (Exp(), math.exp),
        (Softplus(), lambda phi: math.log1p(math.exp(phi))),
        (ScaledSigmoid(2.5), lambda phi: 2.5 * expit(phi)),
    ],
)
def test_formula(scale, formula):
    expected = torch.tensor([float(formula(phi)) for phi in PHI.tolist()], dtype=torch.float64)
    torch.testing.assert_close(scale(PHI), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("scale", SCALES)
def test_inverse(scale):
    torch.testing.assert_close(scale.inverse(scale(PHI)), PHI, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("factor", [1e-200, 1e-12, 1e-3, 1.0, 2.4])
def test_inverse_reaches_small_factors(scale, factor):
    factor = torch.tensor(factor, dtype=torch.float64)
    torch.testing.assert_close(scale(scale.inverse(factor)), factor, rtol=1e-9, atol=0)


@pytest.mark.parametrize("scale", [Exp(), Softplus()])
def test_inverse_reaches_large_factors(scale):
    factor = torch.tensor(1e12, dtype=torch.float64)
    torch.testing.assert_close(scale(scale.inverse(factor)), factor, rtol=1e-9, atol=0)


@pytest.mark.parametrize("scale", SCALES)
def test_positive_and_increasing(scale):
    values = scale(torch.linspace(-30, 30, 241, dtype=torch.float64))
    assert (values > 0).all()
    assert (values.diff() > 0).all()


@pytest.mark.parametrize("scale", SCALES)
def test_differentiable(scale):
    phi = PHI.clone().requires_grad_()
    assert torch.autograd.gradcheck(scale, (phi,))


def test_sigmoid_stays_under_its_upper_end_and_does_not_reach_beyond():
    scale = ScaledSigmoid(2.5)
    assert (scale(PHI) < 2.5).all()
    assert scale.inverse(torch.tensor([2.5, 3.0])).isposinf().all()


@pytest.mark.parametrize("upper", [0.0, -1.0, math.nan])
def test_sigmoid_refuses_an_upper_end_that_is_not_positive(upper):
    with pytest.raises(ValueError, match="Expected `upper` > 0"):
        ScaledSigmoid(upper)
