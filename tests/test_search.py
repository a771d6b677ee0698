"""The search over φ: global minima, the guard, the edges."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

from dapcal.calibration.scales import Exp, ScaledSigmoid, Softplus
from dapcal.calibration.search import Point, search
from dapcal.types import DapcalWarning


def well(center: float, depth: float, width: float):
    return lambda t: -depth * math.exp(-(((t - center) / width) ** 2))


def on_log(loss, nll=lambda t: 0.0, base: Point = Point(0.0, 0.0)):  # noqa: B008
    """Loss and NLL given as functions of log g."""
    return lambda factor: base if factor == 0 else Point(loss(math.log(factor)), nll(math.log(factor)))


@pytest.mark.parametrize("center", [-15.0, -7.1, 0.037, 6.6, 12.9])
@pytest.mark.parametrize("scale", [Exp(), Softplus()])
def test_finds_the_deepest_of_several_narrow_wells(center, scale):
    deepest = well(center, 1.0, 0.3)
    others = [well(c, 0.7, 0.5) for c in (-17.0, -11.0, -4.0, 3.0, 9.5) if abs(c - center) > 1.5]

    def loss(t: float) -> float:
        return deepest(t) + sum(other(t) for other in others) + 0.05 * math.sin(3 * t)

    grid = np.linspace(-18.4, 13.8, 400_001)
    truth = grid[np.argmin([loss(t) for t in grid[::40]]) * 40]
    phi, _ = search(on_log(loss), scale, 1.0, None)
    factor = float(scale(torch.tensor(phi, dtype=torch.float64)))
    assert math.log(factor) == pytest.approx(truth, abs=0.02)


@pytest.mark.parametrize("unit", [1e-5, 1.0, 300.0])
def test_the_grid_follows_the_unit(unit):
    phi, curve = search(on_log(lambda t: (t - math.log(unit)) ** 2), Exp(), unit, None)
    assert phi == pytest.approx(math.log(unit), abs=0.01)
    assert float(curve.phi[0]) == pytest.approx(math.log(unit * 1e-8))
    assert float(curve.phi[-1]) == pytest.approx(math.log(unit * 1e6))


@pytest.mark.parametrize("scale", [Exp(), Softplus(), ScaledSigmoid(50.0)])
@pytest.mark.parametrize("boundary", [-3.3, 0.0, 2.123])
def test_stops_at_the_guard(scale, boundary):
    """Loss falls and NLL rises with φ: the answer lies where the NLL has risen by the guard, never beyond."""
    evaluate = on_log(lambda t: -t, lambda t: 1.5 + 0.01 * math.exp(t - boundary), Point(100.0, 1.5))
    phi, curve = search(evaluate, scale, 1.0, guard=0.01)
    found = math.log(float(scale(torch.tensor(phi, dtype=torch.float64))))
    assert boundary - 0.01 < found <= boundary + 1e-4  # the guard has a slack of 1e-7 nats for rounding
    assert curve.guard == pytest.approx(1.51, abs=1e-6)


def test_a_guard_that_does_not_bind_changes_nothing():
    evaluate = on_log(lambda t: (t - 1) ** 2, lambda t: 0.1 * math.tanh(t / 10))
    assert search(evaluate, Exp(), 1.0, guard=1.0)[0] == search(evaluate, Exp(), 1.0, guard=None)[0]


def test_the_guard_may_leave_an_island():
    """Allowed are only factors around a dip of the NLL, far from the minimum of the loss."""
    evaluate = on_log(lambda t: (t - 8) ** 2, lambda t: (t + 2) ** 2)
    phi, _ = search(evaluate, Exp(), 1.0, guard=0.25)
    assert phi == pytest.approx(-1.5, abs=0.01)
    assert phi <= -1.5


def test_no_feasible_factor():
    with pytest.raises(ValueError, match=r"No φ keeps .* within 0.01 nats .* 0.5 .*smallest found is 2.*raise `guard`"):
        search(on_log(lambda t: t, lambda t: 2.0, Point(0.0, 0.5)), Exp(), 1.0, guard=0.01)


def test_losses_that_are_not_numbers_are_passed_over():
    phi, _ = search(on_log(lambda t: math.nan if t < 0 else (t - 2) ** 2), Exp(), 1.0, None)
    assert phi == pytest.approx(2.0, abs=0.01)
    with pytest.raises(ValueError, match="No φ keeps"):
        search(on_log(lambda t: t, lambda t: math.nan), Exp(), 1.0, None)


@pytest.mark.parametrize("loss", [lambda t: t, lambda t: 0.0])
def test_lower_edge_warns(loss):
    with pytest.warns(DapcalWarning, match="No distance improves the calibration loss.*lower edge"):
        phi, curve = search(on_log(loss), Exp(), 1.0, None)
    assert phi == float(curve.phi[0])


def test_upper_edge_warns():
    with pytest.warns(DapcalWarning, match="upper edge of the search.*Set a guard"):
        phi, curve = search(on_log(lambda t: -t), Exp(), 1.0, None)
    assert phi == float(curve.phi[-1])


def test_the_whole_curve_comes_back_sorted():
    tried = []

    def evaluate(factor: float) -> Point:
        tried.append(factor)
        return Point(3.0, 4.0) if factor == 0 else Point((math.log(factor) - 1) ** 2, factor)

    phi, curve = search(evaluate, Exp(), 1.0, None, candidates=40)
    assert (curve.phi.diff() > 0).all()
    assert len(curve.phi) == len(curve.loss) == len(curve.nll) == len(tried) - 1
    np.testing.assert_allclose(curve.phi.exp().numpy(), sorted(tried)[1:], rtol=1e-12)
    torch.testing.assert_close(curve.loss, (curve.phi - 1) ** 2)
    torch.testing.assert_close(curve.nll, curve.phi.exp())
    assert (curve.base_loss, curve.base_nll, curve.guard) == (3.0, 4.0, math.inf)
    assert float(curve.phi[curve.loss.argmin()]) == phi


@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 5])
def test_every_round_divides_the_interval_by_five(rounds):
    _, curve = search(on_log(lambda t: abs(t - 1.2345)), Exp(), 1.0, None, rounds=rounds)
    step = math.log(1e14) / 99
    assert float(curve.phi.diff().min()) == pytest.approx(step / 5**rounds, rel=1e-6)
    assert float(curve.loss.min()) <= step / 5**rounds


def test_phi_zero_is_a_number_like_any_other():
    class Whole:
        """exp(φ) whose grid lies on whole numbers, so that a refinement hits φ = 0 exactly."""

        def __call__(self, phi: torch.Tensor) -> torch.Tensor:
            return phi.exp()

        def inverse(self, factor: torch.Tensor) -> torch.Tensor:
            return factor.log().round()

    phi, _ = search(on_log(abs), Whole(), 1.0, None, candidates=4, span=(math.exp(-16), math.exp(14)), rounds=1)
    assert phi == 0.0


def test_sigmoid_finds_an_inner_minimum():
    phi, curve = search(on_log(lambda t: (t + 3) ** 2), ScaledSigmoid(2.0), 1.0, None)
    assert float(ScaledSigmoid(2.0)(torch.tensor(phi))) == pytest.approx(math.exp(-3), rel=0.01)
    assert curve.phi.isfinite().all()


def test_sigmoid_reaches_up_to_its_upper_end():
    """A minimum between the last point of the grid and the upper end is an inner minimum of g."""
    scale = ScaledSigmoid(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        phi, _ = search(on_log(lambda t: (t - math.log(0.99)) ** 2), scale, 1.0, None)
    assert float(scale(torch.tensor(phi))) == pytest.approx(0.99, abs=0.005)


@pytest.mark.parametrize("upper", [1e-9, 1.2e-8])
def test_sigmoid_whose_upper_end_is_too_small(upper):
    with pytest.raises(
        ValueError, match=r"ScaledSigmoid.*reaches no useful factors.*around 1\); use a larger upper end"
    ):
        search(on_log(lambda t: t), ScaledSigmoid(upper), 1.0, None)
