"""Metrics against torchmetrics, brute force over pairs and thresholds, closed forms and Monte Carlo."""

from __future__ import annotations

import math
import sys
from functools import partial
from itertools import permutations

import pytest
import torch
from torchmetrics import functional as peer

from cases import doubles
from dapcal import metrics, ranks


@pytest.fixture(params=["continuous", "tied"])
def scores(request, generator):
    """Scores of 230 inputs inside and 170 outside."""
    inside, outside = torch.randn(230, generator=generator), 1 + torch.randn(170, generator=generator)
    return (inside, outside) if request.param == "continuous" else (inside.round(), outside.round())


@pytest.fixture
def labelled(generator):
    """Overconfident probabilities (500, 4) and labels."""
    logits = torch.randn(500, 4, generator=generator, dtype=torch.float64)
    y = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    return (2.5 * logits).softmax(-1), y


def flagged(inside, outside, threshold):
    return (inside >= threshold).double().mean(), (outside >= threshold).double().mean()


# --- detection


def test_auroc_counts_pairs(scores):
    inside, outside = scores
    pairs = (outside[:, None] > inside).double() + 0.5 * (outside[:, None] == inside)
    found = metrics.detection(inside, outside).auroc
    assert found == pytest.approx(float(pairs.mean()), abs=1e-12)
    assert found == pytest.approx(ranks.auroc(outside, inside), abs=1e-12)


def test_average_precision_of_both_classes_is_that_of_torchmetrics(scores):
    inside, outside = scores
    both = torch.cat([inside, outside]).double()
    truth = torch.arange(len(both)) >= len(inside)
    found = metrics.detection(inside, outside)
    # torchmetrics squashes what lies outside [0, 1] to float32, so the scores are given as ranks in (0, 1)
    ranks = (torch.unique(both, return_inverse=True)[1].double() + 0.5) / 1000
    assert found.aucpr == pytest.approx(float(peer.average_precision(ranks, truth.long(), "binary")), abs=1e-6)
    other = peer.average_precision(1 - ranks, (~truth).long(), "binary")
    assert found.aucpr_inside == pytest.approx(float(other), abs=1e-6)


def test_fpr95_is_the_smallest_share_over_all_thresholds_that_flag_enough(scores):
    inside, outside = scores
    rates = [flagged(inside, outside, t) for t in torch.cat([inside, outside])]
    expected = min(false for false, true in rates if true >= 0.95 - 1e-12)
    assert metrics.detection(inside, outside).fpr95 == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize(("wanted", "fpr"), [(19, 0.0), (18, 1.0)])
def test_fpr95_takes_nineteen_of_twenty(wanted, fpr):
    outside = torch.cat([torch.full((wanted,), 2.0), torch.zeros(20 - wanted)])
    assert metrics.detection(torch.ones(7), outside).fpr95 == fpr


def test_perfect_reversed_and_constant_scores():
    low, high = torch.arange(10.0), torch.arange(20.0, 50.0)
    assert metrics.detection(low, high) == pytest.approx((1, 1, 1, 0))
    assert metrics.detection(high, low)[::3] == (0.0, 1.0)
    constant = metrics.detection(torch.ones(10), torch.ones(30))
    assert constant == pytest.approx((0.5, 0.75, 0.25, 1.0))


@pytest.mark.parametrize("metric", [metrics.detection, metrics.roc_curve, metrics.precision_recall_curve])
def test_detection_depends_on_the_order_of_scores_alone_and_takes_infinite_ones(scores, metric):
    inside, outside = scores
    largest, smallest = torch.cat(scores).max(), torch.cat(scores).min()

    def stretched(x):
        infinite = torch.full_like(x, math.inf)
        return torch.where(x == largest, infinite, torch.where(x == smallest, -infinite, x.double().exp().to(x)))

    for found, expected in zip(metric(stretched(inside), stretched(outside)), metric(inside, outside), strict=True):
        torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("points", [2, 17, 201, 5000])
def test_the_roc_curve_lies_on_the_curve_of_all_thresholds(scores, points):
    inside, outside = scores
    false, true = metrics.roc_curve(inside, outside, points)
    assert len(false) == len(true) == points
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
    corners = torch.tensor([(0, 0), *(flagged(inside, outside, t) for t in torch.cat(scores).unique().flip(0))])
    for x, y in zip(false, true, strict=True):
        before = corners[corners.sum(1) <= x + y + 1e-12][-1]
        after = corners[corners.sum(1) >= x + y - 1e-12][0]
        cross = (after[0] - before[0]) * (y - before[1]) - (after[1] - before[1]) * (x - before[0])
        assert abs(cross) < 1e-12
    if points == 5000:
        area = torch.trapezoid(true, false)
        assert float(area) == pytest.approx(metrics.detection(inside, outside).auroc, abs=1e-4)


def test_the_precision_recall_curve_is_the_step_function_whose_area_is_the_average_precision(scores):
    inside, outside = scores
    recall, precision = metrics.precision_recall_curve(inside, outside)
    assert recall.tolist() == pytest.approx(torch.linspace(0, 1, 201, dtype=torch.float64).tolist())
    thresholds = torch.cat(scores).unique().flip(0)
    for wanted, found in zip(recall, precision, strict=True):
        reached = next(
            t for t in thresholds if (outside >= t).any() and (outside >= t).double().mean() >= wanted - 1e-9
        )
        hits, alarms = (outside >= reached).sum(), (inside >= reached).sum()
        assert float(found) == pytest.approx(float(hits / (hits + alarms)))
    fine = metrics.precision_recall_curve(inside, outside, 20_001).precision
    assert float(fine.mean()) == pytest.approx(metrics.detection(inside, outside).aucpr, abs=1e-3)


@pytest.mark.parametrize("metric", [metrics.detection, metrics.roc_curve, metrics.precision_recall_curve])
def test_bad_scores_are_refused(metric):
    good = torch.rand(5)
    with pytest.raises(ValueError, match=r"numbers in `outside`, got NaN in 1 of 3; drop"):
        metric(good, torch.tensor([1.0, math.nan, 2.0]))
    with pytest.raises(ValueError, match=r"`inside` as scores \(N,\), at least one, got shape \(0,\)"):
        metric(torch.empty(0), good)
    with pytest.raises(ValueError, match=r"`outside` as scores .* got shape \(5, 1\)"):
        metric(good, good[:, None])


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"need scikit-learn; install it with: pip install 'dapcal\[experiments\]'"):
        metrics.detection(torch.rand(5), torch.rand(5))


# --- classes


def test_accuracy_and_calibration_error_are_those_of_torchmetrics(labelled):
    probs, y = labelled
    assert metrics.accuracy(probs, y) == pytest.approx(float(peer.accuracy(probs, y, "multiclass", num_classes=4)))
    for bins in (1, 10, 15):
        expected = peer.calibration_error(probs, y, "multiclass", n_bins=bins, num_classes=4)
        assert metrics.expected_calibration_error(probs, y, bins) == pytest.approx(float(expected), abs=1e-6)
    assert metrics.expected_calibration_error(probs, y) > 0.1  # so that agreement means something


def test_brier_by_hand():
    probs, y = doubles([[0.7, 0.2, 0.1], [0.0, 1.0, 0.0], [1 / 3, 1 / 3, 1 / 3]]), torch.tensor([0, 2, 1])
    assert metrics.brier(probs, y) == pytest.approx((0.09 + 0.04 + 0.01 + 2 + 4 / 9 + 2 / 9) / 3)


def test_the_adaptive_error_by_a_loop_over_sorted_parts(labelled):
    probs, y = labelled
    top, label = probs.max(-1)
    right = (label == y).double()
    order = sorted(range(len(y)), key=lambda i: float(top[i]))
    parts = [order[i : i + 50] for i in range(0, 500, 50)]
    expected = sum(abs(float(right[part].mean() - top[part].mean())) for part in parts) / 10
    assert metrics.adaptive_calibration_error(probs, y, bins=10) == pytest.approx(expected, abs=1e-12)


def test_the_adaptive_error_does_not_hang_on_the_order_of_equal_confidences():
    probs = doubles([[0.6, 0.4]] * 4)
    found = {metrics.adaptive_calibration_error(probs, torch.tensor(y), 2) for y in permutations([0, 0, 1, 1])}
    assert [*found] == pytest.approx([0.1])


def test_more_bins_than_inputs_are_no_trouble():
    probs, y = doubles([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0])
    assert metrics.adaptive_calibration_error(probs, y, 40) == pytest.approx((0.1 + 0.8) / 2)
    assert metrics.expected_calibration_error(probs, y, 40) == pytest.approx((0.1 + 0.8) / 2)


def test_a_calibrated_classifier_has_no_calibration_error(generator):
    probs = torch.rand(200_000, 1, generator=generator, dtype=torch.float64)
    probs = torch.cat([probs, 1 - probs], 1)
    y = torch.multinomial(probs, 1, generator=generator)[:, 0]
    assert metrics.expected_calibration_error(probs, y) < 0.005
    assert metrics.adaptive_calibration_error(probs, y) < 0.005


def test_reliability_by_hand_with_closed_upper_ends():
    probs = doubles([[0.5, 0.5], [0.75, 0.25], [0.8, 0.2], [0.0, 1.0]])
    found = metrics.reliability(probs, torch.tensor([0, 1, 0, 1]), bins=4)
    assert found.counts.tolist() == [0, 1, 1, 2]
    assert found.confidence[1:].tolist() == pytest.approx([0.5, 0.75, 0.9])
    assert found.accuracy[1:].tolist() == [1, 0, 1]
    assert found.confidence[0].isnan()
    assert found.accuracy[0].isnan()


def test_probabilities_that_do_not_sum_to_one_are_taken_as_they_are():
    probs, y = doubles([[1.5, 0.5], [0.1, 0.2]]), torch.tensor([0, 0])
    assert metrics.accuracy(probs, y) == 0.5
    assert metrics.brier(probs, y) == pytest.approx((0.25 + 0.25 + 0.81 + 0.04) / 2)
    assert metrics.expected_calibration_error(probs, y, 10) == pytest.approx((0.5 + 0.2) / 2)
    assert metrics.reliability(probs, y, 10).counts.tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "metric",
    [metrics.accuracy, metrics.brier, metrics.expected_calibration_error, metrics.adaptive_calibration_error],
)
def test_bad_classes_are_refused(metric, labelled):
    probs, y = labelled
    with pytest.raises(ValueError, match=r"`probs` \(N, K\) and `y` \(N,\)"):
        metric(probs, y[:, None])
    with pytest.raises(ValueError, match=r"indices between 0 and 3, got others; use y.long"):
        metric(probs, y.double())
    with pytest.raises(ValueError, match="indices between 0 and 3"):
        metric(probs, y + 1)
    with pytest.raises(ValueError, match="NaN in 4 of 2000"):
        metric(torch.where(torch.arange(500)[:, None] == 3, math.nan, probs), y)


# --- regression


@pytest.mark.parametrize("shape", [(300,), (300, 2)])
def test_rmse_is_that_of_torchmetrics(shape, generator):
    mean, y = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    expected = peer.mean_squared_error(mean.flatten(), y.flatten(), squared=False)
    assert metrics.rmse(mean, y) == pytest.approx(float(expected))


def test_crps_is_the_expected_distance_less_half_the_spread(generator):
    """E|Y − y| − ½ E|Y − Y'|, the other form of the score, by Monte Carlo."""
    mean, variance, y = doubles([0.3, -1.0, 2.0]), doubles([1.0, 0.04, 9.0]), doubles([0.0, 0.5, 2.0])
    draws = mean + variance.sqrt() * torch.randn(2, 1_000_000, 3, generator=generator, dtype=torch.float64)
    expected = (draws[0] - y).abs().mean(0) - 0.5 * (draws[0] - draws[1]).abs().mean(0)
    found = [metrics.crps_gaussian(m, v, t) for m, v, t in zip(mean, variance, y, strict=True)]
    assert found == pytest.approx(expected.tolist(), abs=5e-3)
    assert metrics.crps_gaussian(mean, variance, y) == pytest.approx(sum(found) / 3)


def test_crps_without_variance_is_the_absolute_error():
    assert metrics.crps_gaussian(doubles([1.0, 2.0]), doubles([0.0, 0.0]), doubles([1.0, 5.0])) == 1.5


def test_coverage_and_width_of_gaussian_intervals(generator):
    y = torch.randn(100_000, generator=generator)
    ends = torch.full_like(y, 1.959964)
    assert metrics.coverage(-ends, ends, y) == pytest.approx(0.95, abs=0.003)
    assert metrics.mean_width(-ends, ends) == pytest.approx(3.919928)
    assert metrics.coverage(doubles([0.0, 0.0]), doubles([1.0, 1.0]), doubles([1.0, 1.1])) == 0.5


@pytest.mark.parametrize(
    ("metric", "tensors"),
    [(metrics.rmse, 2), (metrics.crps_gaussian, 3), (metrics.coverage, 3), (metrics.mean_width, 2)],
)
def test_bad_targets_are_refused(metric, tensors):
    good = torch.ones(4)
    with pytest.raises(ValueError, match=r"one shape.* \(4, 1\).*; reshape or expand"):
        metric(*[good] * (tensors - 1), good[:, None])
    with pytest.raises(ValueError, match="NaN in 4 of 4"):
        metric(*[good] * (tensors - 1), math.nan * good)


def test_a_negative_variance_is_refused():
    with pytest.raises(ValueError, match="`variance` >= 0, got -1; pass the square"):
        metrics.crps_gaussian(torch.ones(2), -torch.ones(2), torch.ones(2))


# --- selective prediction


def test_selective_risk_by_a_loop(generator):
    doubt, loss = torch.randn(2, 57, generator=generator, dtype=torch.float64).abs()
    order = sorted(range(57), key=lambda i: float(doubt[i]))
    expected = [float(loss[order[: k + 1]].mean()) for k in range(57)]
    found = metrics.selective_risk(doubt, loss)
    assert found.risk.tolist() == pytest.approx(expected)
    assert found.coverage.tolist() == pytest.approx([(k + 1) / 57 for k in range(57)])
    assert found.area == pytest.approx(sum(expected) / 57)


def test_equal_doubt_counts_as_a_random_order():
    loss = doubles([0.0, 1.0, 5.0, 2.0])
    doubt = doubles([0.0, 1.0, 1.0, 1.0])
    areas = [
        metrics.selective_risk(doubles([0, *order]), loss).area for order in permutations((1, 2, 3))
    ]  # every way to break the tie
    assert metrics.selective_risk(doubt, loss).area == pytest.approx(sum(areas) / len(areas))


def test_a_long_risk_curve_is_thinned_and_its_area_is_not(generator):
    doubt = torch.rand(5000, generator=generator)
    loss = (torch.rand(5000, generator=generator) < doubt).double()
    found = metrics.selective_risk(doubt, loss)
    assert len(found.risk) == len(found.coverage) == 101
    assert float(found.risk[-1]) == pytest.approx(float(loss.mean()))
    assert found.coverage[-1] == 1
    sorted_loss = loss[doubt.argsort()]
    assert found.area == pytest.approx(float((sorted_loss.cumsum(0) / torch.arange(1, 5001)).mean()))
    assert found.area < metrics.selective_risk(-doubt, loss).area


# --- all


@pytest.mark.parametrize(
    "metric",
    [
        metrics.accuracy,
        metrics.brier,
        metrics.expected_calibration_error,
        metrics.adaptive_calibration_error,
        lambda probs, y: metrics.rmse(probs[:, 0], y.double()),
        lambda probs, y: metrics.crps_gaussian(probs[:, 0], probs[:, 1], y.double()),
        lambda probs, y: metrics.selective_risk(probs[:, 0], y.double()).area,
        lambda probs, y: metrics.detection(probs[y > 1, 0], probs[y <= 1, 0]).auroc,
    ],
)
def test_metrics_are_floats_that_do_not_hang_on_the_order_of_inputs(metric, labelled, generator):
    probs, y = labelled
    order = torch.randperm(len(y), generator=generator)
    assert type(metric(probs, y)) is float
    assert metric(probs[order], y[order]) == pytest.approx(metric(probs, y), rel=1e-12)
    assert metric(probs.float().requires_grad_(), y) == pytest.approx(metric(probs, y), rel=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(metrics.roc_curve, points=1), "`points` >= 2, got 1"),
        (partial(metrics.precision_recall_curve, points=0), "`points` >= 2, got 0"),
        (partial(metrics.reliability, bins=0), "`bins` >= 1, got 0"),
        (partial(metrics.adaptive_calibration_error, bins=0), "`bins` >= 1, got 0"),
    ],
)
def test_too_few_bins_or_points_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.rand(5), torch.rand(5))
