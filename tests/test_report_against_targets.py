"""What the report draws where new rows have the target: curves against scikit-learn, dots against the rows."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics
from torch.testing import assert_close

from cases import doubles
from dapcal.models.columns import Unit
from dapcal.models.judged_rows import GroupCoverage, Judged, JudgedClasses, JudgedNumbers
from dapcal.report.questions import new_amounts, new_categories, new_classes
from test_report_page import drawn_in


def examples_of(judged, classes=(), target="price", unit=None):
    subject = SimpleNamespace(
        judged=judged, classes=classes, target=target, new_name="may.csv", unit=unit or Unit(300.0, 80.0)
    )
    return SimpleNamespace(subject=subject)


def plain(markup):
    return re.sub("<[^>]*>", " ", markup).replace("\u00a0", " ")


# --- classes


def classified(counts, seed=0, ties=False):
    """Rows of classes, so many of each, whose probabilities know something of them."""
    generator = torch.Generator().manual_seed(seed)
    true = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    scores = torch.randn(len(true), len(counts), generator=generator, dtype=torch.float64)
    scores[torch.arange(len(true)), true] += 1.0
    probabilities = scores.softmax(1)
    if ties:
        probabilities = (probabilities * 20).round() / 20
    names = tuple(f"class {place}" for place in range(len(counts)))
    judged = Judged((("share right", "70 %", "60 %"),), len(true), JudgedClasses(true, probabilities))
    return examples_of(judged, names), true.numpy(), probabilities.numpy()


@pytest.mark.parametrize("ties", [False, True])
def test_the_curves_of_two_classes_are_scikit_learns(ties):
    examples, true, probabilities = classified([260, 140], ties=ties)
    found = new_classes.measure(examples)
    (own,) = found.classes
    assert own.name == "class 1"
    assert own.share == 0.35
    assert own.auroc == pytest.approx(sklearn_metrics.roc_auc_score(true, probabilities[:, 1]))
    wanted = sklearn_metrics.average_precision_score(true, probabilities[:, 1])
    assert own.average_precision == pytest.approx(wanted)
    false, recall, _ = sklearn_metrics.roc_curve(true, probabilities[:, 1])
    mine = doubles(own.roc)
    assert_close(mine[:, 1] + mine[:, 0], torch.linspace(0, 2, len(mine), dtype=torch.float64))
    places = np.interp(mine.sum(1), false + recall, recall)
    assert mine[:, 1].numpy() == pytest.approx(places)
    predicted = probabilities.argmax(1)
    assert found.decision.recall == pytest.approx(sklearn_metrics.recall_score(true, predicted))
    assert found.decision.precision == pytest.approx(sklearn_metrics.precision_score(true, predicted))
    assert found.decision.false_alarms == pytest.approx(np.mean(predicted[true == 0]))


def test_the_curves_of_two_classes_are_drawn_with_the_decision_on_them():
    examples, true, probabilities = classified([260, 140])
    found = new_classes.measure(examples)
    markup = new_classes.section(examples, found)
    roc, precision = drawn_in(markup)
    assert_close(roc.lines("after")[0], doubles(found.classes[0].roc), atol=0.005, rtol=0)
    assert_close(precision.lines("after")[0], doubles(found.classes[0].precision), atol=0.005, rtol=0)
    decision = found.decision
    assert_close(roc.dots("after"), doubles([[decision.false_alarms, decision.recall]]), atol=0.005, rtol=0)
    assert_close(precision.dots("after"), doubles([[decision.recall, decision.precision]]), atol=0.005, rtol=0)
    nearest = (doubles(found.classes[0].roc) - roc.dots("after")).norm(dim=1).min()
    assert float(nearest) < 0.02
    auroc = sklearn_metrics.roc_auc_score(true, probabilities[:, 1])
    assert f"(AUROC): {100 * auroc:.0f} %" in plain(markup)
    assert "guessing, 35 %" in plain(markup)
    assert "<table" not in markup


def test_several_classes_are_drawn_one_against_the_rest_with_their_mean():
    examples, true, probabilities = classified([150, 100, 50])
    found = new_classes.measure(examples)
    mean = found.mean
    auroc = sklearn_metrics.roc_auc_score(true, probabilities, multi_class="ovr", average="macro")
    average = sklearn_metrics.average_precision_score(np.eye(3)[true], probabilities, average="macro")
    assert (mean.auroc, mean.average_precision) == pytest.approx((auroc, average))
    x, y = np.array(mean.roc).T
    assert np.trapezoid(y, x) == pytest.approx(auroc, abs=0.01)
    assert np.mean(np.array(mean.precision)[:, 1]) == pytest.approx(average, abs=0.02)
    markup = new_classes.section(examples, found)
    for chart in drawn_in(markup):
        assert [len(chart.lines(kind)) for kind in ("after", "out", "train")] == [1, 1, 2]
    worst = min(found.classes, key=lambda curves: curves.auroc)
    assert f"told apart worst: {worst.name}" in plain(markup)
    for place in range(3):
        own = sklearn_metrics.roc_auc_score(true == place, probabilities[:, place])
        (line,) = [line for line in re.findall("<tr>.*?</tr>", markup) if f">class {place}<" in line]
        assert f" {100 * own:.0f} %" in plain(line)


def test_at_most_eight_classes_with_ten_rows_each_are_drawn():
    examples, *_ = classified([30, 9, 31, 32, 33, 34, 35, 36, 37, 38, 39])
    found = new_classes.measure(examples)
    assert [curves.name for curves in found.classes] == [f"class {place}" for place in range(10, 2, -1)]
    assert found.left_out == 3
    assert "3 with fewer rows are not shown" in new_classes.section(examples, found)
    assert len(new_classes.measure(classified([30, 9, 12])[0]).classes) == 2


@pytest.mark.parametrize("counts", [[40, 0], [0, 40], [0, 0, 40], [3, 4, 5]])
def test_rows_of_one_class_have_no_curve(counts):
    examples, *_ = classified(counts)
    assert new_classes.measure(examples) is None
    assert new_classes.section(examples, None) == ""


def test_a_class_that_is_never_predicted_has_no_precision():
    true = torch.tensor([0, 0, 0, 1, 1])
    probabilities = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.7, 0.3], [0.55, 0.45]]).double()
    examples = examples_of(Judged((), 5, JudgedClasses(true, probabilities)), ("no", "yes"))
    found = new_classes.measure(examples)
    assert found.decision == (0.0, 0.0, None)
    roc, precision = drawn_in(new_classes.section(examples, found))
    assert (len(roc.dots("after")), len(precision.all("circle"))) == (1, 0)


# --- numbers


def estimated(count, scale=1.0, seed=0, **changed):
    generator = torch.Generator().manual_seed(seed)
    predicted = scale * (3 + torch.rand(count, generator=generator, dtype=torch.float64))
    width = scale * 0.2
    true = predicted + 0.5 * width * torch.randn(count, generator=generator, dtype=torch.float64)
    flagged = torch.rand(count, generator=generator) < 0.1
    rows = JudgedNumbers(true, predicted, predicted - width, predicted + width, flagged)._replace(**changed)
    coverage = float(((rows.lower <= rows.true) & (rows.true <= rows.upper)).double().mean())
    return Judged((("error", "1", "2"),), count, rows, coverage)


@pytest.mark.parametrize(
    ("scale", "word", "divisor"), [(1.0, "", 1), (50_000.0, "thousands", 1e3), (1e9, "millions", 1e6)]
)
def test_dots_are_predictions_against_truth_in_a_size_that_people_read(scale, word, divisor):
    judged = estimated(200, scale)
    examples = examples_of(judged)
    markup = new_amounts.section(examples, new_amounts.measure(examples))
    (chart,) = drawn_in(markup)
    size = scale / divisor
    wanted = torch.stack([judged.sample.predicted, judged.sample.true], 1) / divisor
    for kind, which in (("many", ~judged.sample.is_flagged), ("out", judged.sample.is_flagged)):
        found = chart.dots(kind)
        assert_close(found[found[:, 0].argsort()][:, 0], wanted[which, 0].sort().values, atol=0.004 * size, rtol=0)
        gaps = torch.cdist(wanted[which], found).min(1).values
        assert float(gaps.max()) < 0.006 * size
    ideal = chart.lines("ideal")[0]
    assert_close(ideal[:, 0], ideal[:, 1], atol=0.004 * size, rtol=0)
    told = plain(markup)
    assert ("(" + word + ")" in told) == bool(word)
    assert not re.search(r"\de[+−-]?\d", told)
    inside = (judged.sample.lower <= judged.sample.true) & (judged.sample.true <= judged.sample.upper)
    flagged = int(judged.sample.is_flagged.sum())
    share = 100 * float(inside[judged.sample.is_flagged].double().mean())
    assert f"95 % intervals hold {100 * judged.coverage:.0f} % of the true values" in told
    assert f"{share:.0f} % of those of the {flagged} rows that are flagged" in told
    assert "All 200 rows" in told


def test_the_band_is_made_of_medians_over_equal_counts():
    judged = estimated(300)
    found = new_amounts.measure(examples_of(judged))
    order = judged.sample.predicted.argsort()
    assert len(found.band.predicted) == 15
    assert found.band.lower[3] == float(judged.sample.lower[order[60:80]].quantile(0.5))
    assert new_amounts.measure(examples_of(estimated(39))).band is None


def test_at_most_six_hundred_dots_are_drawn_and_the_words_say_so():
    examples = examples_of(estimated(2000))
    found = new_amounts.measure(examples)
    assert len(found.true) == 600
    assert "600 of 2,000 rows, drawn at random" in plain(new_amounts.section(examples, found))


def test_a_few_values_far_out_do_not_shrink_the_rest():
    judged = estimated(400)
    true = judged.sample.true.clone()
    true[7] = 9e6
    examples = examples_of(Judged((), 400, judged.sample._replace(true=true), 1.0))
    found = new_amounts.measure(examples)
    assert found.scale.high < 6
    assert "1 of them lies beyond the axes" in plain(new_amounts.section(examples, found))


@pytest.mark.parametrize("odd", [1e300, float("inf"), float("nan")])
def test_what_is_beyond_all_numbers_is_not_drawn(odd):
    judged = estimated(50)
    true = judged.sample.true.clone()
    true[0] = odd
    examples = examples_of(Judged((), 50, judged.sample._replace(true=true), 1.0))
    assert len(new_amounts.measure(examples).true) == 49
    only = Judged((), 1, JudgedNumbers(*(values[:1] for values in judged.sample))._replace(true=doubles([odd])), 0.0)
    assert new_amounts.measure(examples_of(only)) is None


@pytest.mark.parametrize("count", [1, 2])
def test_a_row_or_two_are_enough(count):
    examples = examples_of(estimated(count))
    assert "<circle" in new_amounts.section(examples, new_amounts.measure(examples))


def test_axes_are_like_a_logarithm_where_one_is_learnt():
    generator = torch.Generator().manual_seed(0)
    true = (8 + 1.5 * torch.randn(300, generator=generator, dtype=torch.float64)).exp()
    judged = Judged((), 300, JudgedNumbers(true, true * 1.1, true / 2, true * 2, true < 0), 1.0)
    learns = examples_of(judged, unit=Unit(8.0, 1.5, smearing=1.1))
    assert "The axes shrink large values" in plain(new_amounts.section(learns, new_amounts.measure(learns)))
    even = new_amounts.measure(examples_of(judged))
    assert even.scale.unit is None


def test_nothing_is_drawn_without_targets():
    examples = examples_of(None)
    assert new_amounts.measure(examples) is new_classes.measure(examples) is None
    assert new_amounts.section(examples, None) == new_categories.section(examples) == ""
    assert new_classes.measure(examples_of(estimated(9))) is None
    assert new_amounts.measure(classified([9, 9])[0]) is None


# --- categories


def test_the_lowest_categories_are_told_and_those_that_chance_does_not_explain():
    low = [GroupCoverage("town", "Rome", 60, 0.7, is_low=True), GroupCoverage("town", "Oslo", 40, 0.93, is_low=False)]
    many = [GroupCoverage("street", f"s{place}", 30, 0.96, is_low=False) for place in range(20)]
    judged = Judged((), 500, estimated(5).sample, 0.91, (*low, *many))
    told = plain(new_categories.section(examples_of(judged)))
    assert "95 % intervals hold 91 % of the true values of all 500 rows" in told
    assert "Of 22 categories with 30 rows or more, 1 holds fewer than chance explains" in told
    assert re.search(r"town: Rome\s+60\s+70 % \(too few\)\s+town: Oslo\s+40\s+93 %\s+street: s0", told)
    assert "14 more hold more" in told
    calm = Judged((), 500, judged.sample, 0.95, tuple(many))
    assert "none holds fewer than chance explains" in plain(new_categories.section(examples_of(calm)))
