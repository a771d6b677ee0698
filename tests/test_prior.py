"""The distance-aware prior: exact arithmetic as oracle, grouping by name, refusals."""

import math
from fractions import Fraction

import pytest
import torch

from dapcal.prior import make_prior

SIZES = {"mean.weight": 3, "mean.bias": 2, "noise.weight": 4}
DISTANCES = [0.0, 1e-300, 1e-15, 1e-9, 1e-3, 0.1, 1.0, 17.0, 1e4, 1e8]


def column(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("sigma0", [1e-3, 0.3, 1.0, 7.5])
@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_precision_drop_keeps_all_digits(sigma0, factor):
    prior = make_prior({"w": 1}, sigma0, {"w": factor})
    got = prior.precision_drop(column(DISTANCES))
    s, a = Fraction(sigma0), Fraction(factor)
    exact = [float(1 / s**2 - 1 / (s + a * Fraction(d)) ** 2) for d in DISTANCES]
    assert got.dtype == torch.float64
    assert got.shape == (len(DISTANCES), 1)
    torch.testing.assert_close(got[:, 0], column(exact), rtol=4e-15, atol=0)


def test_precision_drop_starts_at_zero_rises_and_stays_under_the_prior_precision():
    prior = make_prior({"w": 1}, 0.7)
    c = prior.precision_drop(torch.logspace(-12, 6, 400, dtype=torch.float64))[:, 0]
    assert prior.precision_drop(torch.zeros(1)).item() == 0
    assert (c.diff() > 0).all()
    assert c[-1] < 1 / 0.7**2


def test_float32_distances_are_taken_in_float64():
    prior = make_prior({"w": 1}, 0.1)
    d = torch.tensor([1e-6, 0.3])
    for method in (prior.precision_drop, prior.log_widening, prior.widening):
        assert method(d).dtype == torch.float64
        assert torch.equal(method(d), method(d.double()))


@pytest.mark.parametrize("d", [0.0, 1e-18, 1e-9, 0.4, 1e6])
def test_widening_is_that_of_the_group_that_widens_most(d):
    prior = make_prior(SIZES, {"noise.*": 0.5, "*": 4.0}, {"mean.*": 3.0, "noise.*": 0.25})
    distance = column([d])
    relative = [3.0 / 4.0, 0.25 / 0.5]
    assert prior.lead == 0.75
    assert prior.widening(distance).item() == pytest.approx(max(1 + r * d for r in relative), rel=1e-15)
    expected = [math.log1p(r * d) for r in relative]
    torch.testing.assert_close(prior.log_widening(distance), column([expected]), rtol=1e-14, atol=0)


def test_groups_by_pattern_scale_and_factor():
    prior = make_prior(SIZES, {"*.bias": 2.0, "*": 0.5}, {"mean.*": 3.0})
    assert prior.labels == ("mean.*", "mean.*", "not distance-aware")
    assert prior.sigma0.tolist() == [0.5, 2.0, 0.5]
    assert prior.factor.tolist() == [3.0, 3.0, 0.0]
    assert prior.group.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert prior.sizes.tolist() == [3, 2, 4]
    c = prior.precision_drop(column([0.25]))[0]
    torch.testing.assert_close(c, column([1 / 0.25 - 1 / 1.25**2, 1 / 4 - 1 / 2.75**2, 0]))
    assert prior.log_widening(column([0.25]))[0, 2] == 0


@pytest.mark.parametrize("aware", ["mean.*", ["mean.weight", "mean.bias"], {"mean.*": 1.0, "noise.*": 0.0}])
def test_ways_to_name_the_aware_parameters(aware):
    prior = make_prior(SIZES, 1.0, aware)
    assert prior.factor[prior.group].tolist() == [1.0] * 5 + [0.0] * 4


def test_first_match_counts():
    prior = make_prior(SIZES, {"mean.*": 2.0, "*": 1.0, "noise.*": 9.0}, {"*.bias": 5.0, "*": 1.0})
    assert prior.sigma0[prior.group].tolist() == [2.0] * 5 + [1.0] * 4
    assert prior.factor[prior.group].tolist() == [1.0, 1.0, 1.0, 5.0, 5.0, 1.0, 1.0, 1.0, 1.0]


def test_default_is_one_group_with_factor_one():
    prior = make_prior(SIZES, 1.5)
    assert (prior.labels, prior.sigma0.tolist(), prior.factor.tolist()) == (("*",), [1.5], [1.0])
    assert prior.sizes.tolist() == [9]


def test_moves_to_a_device_whole():
    prior = make_prior(SIZES, 1.0, "mean.*")
    moved = prior.to(torch.device("meta"))
    assert moved.labels == prior.labels
    assert {t.device.type for t in (moved.sigma0, moved.factor, moved.group, moved.sizes)} == {"meta"}


@pytest.mark.parametrize("sigma0", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("by_name", [False, True])
def test_bad_sigma0_is_refused(sigma0, by_name):
    with pytest.raises(ValueError, match=r"sigma0.*mean\.weight"):
        make_prior(SIZES, {"mean.weight": sigma0, "*": 1.0} if by_name else sigma0)


@pytest.mark.parametrize("aware", ["means.*", ["mean.*", "typo"], {"typo": 1.0}])
def test_aware_pattern_without_a_match_is_refused(aware):
    with pytest.raises(ValueError, match=r"match none.*mean\.weight"):
        make_prior(SIZES, 1.0, aware)


@pytest.mark.parametrize("aware", [[], {}, {"*": -1.0}, {"*": math.nan}, {"*": math.inf}, {"mean.*": 0.0}])
def test_factors_that_leave_nothing_to_widen_are_refused(aware):
    with pytest.raises(ValueError, match="aware"):
        make_prior(SIZES, 1.0, aware)


def test_aware_pattern_hidden_behind_an_earlier_one_is_refused():
    with pytest.raises(ValueError, match="aware"):
        make_prior(SIZES, 1.0, {"*": 0.0, "mean.*": 1.0})


def test_prior_scale_must_cover_every_parameter():
    with pytest.raises(ValueError, match=r"prior_scale.*noise\.weight"):
        make_prior(SIZES, {"mean.*": 1.0})


def test_prior_scale_pattern_without_a_match_is_refused():
    with pytest.raises(ValueError, match=r"prior_scale.*typo"):
        make_prior(SIZES, {"typo.*": 3.0, "*": 1.0})
