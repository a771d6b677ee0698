"""What reports say and draw, read back from their markup: charts by the ticks of their axes, words by their numbers."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import replace
from functools import cache
from xml.etree import ElementTree

import pytest
import torch
from torch.distributions import Normal
from torch.testing import assert_close

import report_cases
from cases import doubles
from dapcal import calibrate
from dapcal.adjust import Reweight
from dapcal.calibration.scales import ScaledSigmoid
from dapcal.data import Labelled
from dapcal.explain import Answer
from dapcal.likelihoods import Categorical
from dapcal.models.subject import Subject
from dapcal.report.examples import gather, judges, others_of
from dapcal.report.headline import how_far, in_short
from dapcal.report.kit import histograms
from dapcal.report.kit.numbers import number, percent
from dapcal.report.kit.svg import Plot, Scale
from dapcal.report.questions import accuracy, away_from_data, highest_scores, how_sure, phi, plane, weights
from dapcal.report.questions.how_sure import LEVELS
from dapcal.types import DapcalWarning


@cache
def examples_of(name):
    return gather(getattr(report_cases, name)())


@cache
def away_of(name):
    return away_from_data.measure(examples_of(name))


# --- charts


class Drawn:
    """A chart, whose places are read as values by its first and its last tick."""

    def __init__(self, markup, percent=False):
        self.root = ElementTree.fromstring(markup)
        ticks = {kind: self._ticks(kind, percent) for kind in ("middle", "end")}
        (self.left, low), (self.right, high) = ticks["middle"]
        (self.floor, bottom), (self.top, ceiling) = ticks["end"]
        assert self.right > self.left
        assert self.floor > self.top  # larger values are higher up
        self.x = lambda place: low + (place - self.left) / (self.right - self.left) * (high - low)
        self.y = lambda place: bottom + (place - self.floor) / (self.top - self.floor) * (ceiling - bottom)

    def _ticks(self, kind, percent):
        """Places and values of the first and the last tick; of percentages alone, where an axis has others as well."""
        ticks = [each for each in self.all("text", "tick") if kind in each.get("class")]
        ticks = [each for each in ticks if "%" in each.text] if percent else ticks
        places = [float(each.get("x")) if kind == "middle" else float(each.get("y")) - 4 for each in ticks]
        values = [each.text.replace("−", "-").replace(",", "").split("\u00a0") for each in ticks]
        numbers = [float(parts[0]) / (100 if len(parts) > 1 else 1) for parts in values]
        return (places[0], numbers[0]), (places[-1], numbers[-1])

    def all(self, name, *classes):
        return [each for each in self.root.iter(name) if set(classes) <= set(each.get("class", "").split())]

    def dots(self, class_):
        return doubles([[self.x(float(e.get("cx"))), self.y(float(e.get("cy")))] for e in self.all("circle", class_)])

    def lines(self, class_):
        def points(line):
            return [[self.x(float(x)), self.y(float(y))] for x, y in re.findall(r"([\d.-]+),([\d.-]+)", line)]

        return [doubles(points(each.get("points"))) for each in self.all("polyline", class_)]

    def mark(self):
        (line,) = self.all("line", "mark")
        return self.x(float(line.get("x1")))


def drawn_in(markup, **options):
    return [Drawn(chart, **options) for chart in re.findall(r'<svg viewBox="0 0 .*?</svg>(?=<figcap|</fig)', markup)]


def test_reliability_shows_how_often_it_is_right_before_and_after():
    sure = how_sure.measure(examples_of("two_moons"))
    shown = drawn_in(how_sure.section(examples_of("two_moons"), sure), percent=True)
    for chart, found, when in zip(shown, sure, ("before", "after"), strict=True):
        filled = [place for place, count in enumerate(found.bin_counts) if count]
        wanted = [[found.bin_confidence[place], found.bin_accuracy[place]] for place in filled]
        assert_close(chart.dots(when), doubles(wanted), atol=0.005, rtol=0)


def test_reliability_of_two_classes_is_drawn_from_one_half():
    sure = how_sure.measure(examples_of("two_moons"))
    for name, found in (("two_moons", sure), ("images", how_sure.measure(examples_of("images")))):
        before = found.before._replace(bin_counts=(0,) * 4 + (int(name == "images"),) + found.before.bin_counts[5:])
        before = before._replace(bin_confidence=(0.45,) * 5 + before.bin_confidence[5:], bin_accuracy=(0.4,) * 10)
        chart = drawn_in(how_sure.section(examples_of(name), found._replace(before=before)), percent=True)[0]
        assert float(chart.lines("ideal")[0][0, 0]) == pytest.approx(0.5 if name == "two_moons" else 0.0, abs=0.005)
        assert_close(chart.lines("ideal")[0][:, 0], chart.lines("ideal")[0][:, 1], atol=0.005, rtol=0)


def test_coverage_shows_what_intervals_keep_and_what_chance_may_do():
    examples = examples_of("table")
    sure = how_sure.measure(examples)
    chart = drawn_in(how_sure.section(examples, sure))[0]
    for found, when in zip(sure, ("before", "after"), strict=True):
        wanted = torch.stack([doubles(LEVELS), doubles(found.observed)], 1)
        assert_close(chart.dots(when), wanted, atol=0.005, rtol=0)
    (band,) = chart.all("polygon", "band")
    heights = [chart.y(float(y)) for x, y in re.findall(r"([\d.]+),([\d.-]+)", band.get("points")) if _near(chart, x)]
    assert max(heights) - min(heights) == pytest.approx(4 * (0.25 / examples.count) ** 0.5, abs=0.01)


def _near(chart, x):
    return abs(chart.x(float(x)) - 0.5) < 0.01


def test_places_of_targets_are_shares():
    sure = how_sure.measure(examples_of("table"))
    chart = drawn_in(how_sure.section(examples_of("table"), sure))[1]
    counts = doubles(sure.after.pit_counts)
    heights = doubles([chart.y(float(bar.get("y"))) for bar in chart.all("rect", "after")])
    assert_close(heights, counts / counts.sum(), atol=0.002, rtol=0)


def test_histograms_are_those_of_the_samples():
    data = next(each for each in away_of("table").spaces if each.name == "inputs")
    chart = Drawn(histograms.drawn(data, "distance", "radius"))
    assert chart.mark() == pytest.approx(data.line, abs=0.02)
    for name, values in data.samples:
        (outline,) = chart.lines(histograms.series_of(data, name))
        left, share = outline[1:-1:2].unbind(1)
        assert float(share.sum()) == pytest.approx(1, abs=0.02)
        middle = (left + 0.5 * (left[1] - left[0])) @ share / share.sum()
        assert float(middle) == pytest.approx(float(doubles(values).mean()), rel=0.03)


@pytest.mark.parametrize("name", ["two_moons", "table", "one_column"])
def test_losses_are_those_of_the_curve(name):
    examples = examples_of(name)
    curve, chosen = phi.measure(examples), examples.subject.calibrated.phi
    for markup, values in zip(phi.charts(curve, chosen), (curve.loss, curve.nll), strict=True):
        chart = Drawn(markup)
        step = float(chart.x(1) - chart.x(0))
        assert chart.mark() == pytest.approx(chosen, abs=step)
        (line,) = chart.lines("after")
        inside = line[(line[:, 1] < chart.y(20)) & (line[:, 1] > chart.y(227))]
        nearest = (curve.phi - inside[:, :1]).abs().argmin(1)
        assert_close(inside[:, 1], values[nearest], atol=4 * float(chart.y(0) - chart.y(1)), rtol=0)
    there = float(curve.nll[curve.phi == chosen])
    assert f"At the chosen φ it is {number(there)}," in phi.section(examples, curve).replace("\u00a0", " ")


@pytest.mark.parametrize("name", ["two_moons", "table", "one_column", "reweighted"])
def test_no_line_crosses_a_label(name):
    examples = examples_of(name)
    shown = [*phi.charts(phi.measure(examples), examples.subject.calibrated.phi)]
    shown += [histograms.drawn(each, "distance", "radius") for each in away_of(name).spaces]
    for chart in map(Drawn, shown):
        lines = [re.findall(r"([\d.-]+),([\d.-]+)", each.get("points")) for each in chart.all("polyline")]
        places = [(float(x), float(y)) for line in lines for x, y in line]
        places += [(float(each.get("x1")), float(y)) for each in chart.all("line", "mark") for y in range(18, 228)]
        for label in chart.all("text", "label"):
            left, right = _span(label)
            base = float(label.get("y"))
            assert not [(x, y) for x, y in places if left < x < right and base - 8 < y < base + 1], label.text


def _span(label):
    x, width = float(label.get("x")), 6.2 * len(label.text)
    anchor = label.get("class").split()[-1]
    start = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
    return start, start + width


def test_a_label_goes_to_the_end_that_no_line_crosses():
    plot = Plot(Scale(0, 1), Scale(0, 1))
    rising, falling = [(0.85, 0.4), (1.0, 0.65)], [(0.0, 0.65), (0.15, 0.4)]
    above, under = [(0.0, 0.52), (1.0, 0.52)], [(0.0, 0.48), (0.8, 0.48)]

    def spot(*others):
        label = ElementTree.fromstring(f"<g>{plot.horizontal(0.5, 'label', 'limit', others)}</g>")[1]
        return label.get("class").split()[-1], float(label.get("y")) < plot.up(0.5)

    assert spot() == ("end", True)
    assert spot(rising) == ("start", True)
    assert spot(falling) == ("end", True)
    assert spot(above) == ("end", False)
    assert spot(above, [(0.9, 0.48), (1.0, 0.48)]) == ("start", False)
    assert spot(above, under) == ("end", False)


def test_points_of_the_second_of_two_classes_are_black():
    subject = examples_of("two_moons").subject
    data = plane.measure(examples_of("two_moons"))
    x = (data.points - doubles([100.0, 50.0])) / 10
    rows = torch.cdist(x, subject.train.x.double()).argmin(1)
    assert torch.equal(data.is_second, subject.train.y[rows] == 1)
    drawn = re.findall(r'class="point( other)?"', plane.chart(data, "confidence"))
    assert [bool(other) for other in drawn] == data.is_second.tolist()
    assert "white for upper and black for lower" in plane.caption(subject, data)


def test_three_classes_have_points_of_one_colour():
    x = torch.randn(200, 2)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    data = Labelled(x[:100], y[:100]), Labelled(x[100:], y[100:])
    calibrated = report_cases.calibrated_ensemble(*data, Categorical(), 3, epochs=3, scale=ScaledSigmoid(50.0))
    subject = Subject(calibrated, *data, "t", "y", lambda x: [{"a": "1"} for _ in x], classes=("a", "b", "c"))
    found = plane.measure(gather(subject))
    assert not found.is_second.any()
    assert "black" not in plane.caption(subject, found)
    phis = [frame.phi for frame in found.frames[1:]]
    assert all(calibrated.scale(doubles(each)) < 50 for each in phis)  # those that the scale reaches, and no other
    assert found.frames[found.chosen].phi == calibrated.phi


# --- words


def cells_of(markup, row):
    line = next(line for line in re.findall("<tr>.*?</tr>", markup) if f">{row}<" in line)
    return [cell.replace("\u00a0", " ") for cell in re.findall("<td>(.*?)</td>", line)]


def test_the_table_of_behaviour_has_before_and_after_in_their_columns():
    found = away_of("table")
    new = found.others[0]
    shares = [percent(share) for share in (new.flagged, new.doubted, new.far)]
    wanted = ["120", *shares, number(new.before), number(new.after)]
    assert cells_of(away_from_data.section(examples_of("table"), found), "offers of May") == wanted
    assert new.before < new.after


def test_the_price_has_its_sign():
    examples = examples_of("two_moons")
    before, after = accuracy.measure(examples)

    def price(change):
        return accuracy.price(examples, accuracy.Accuracy(before, after._replace(nll=before.nll + change)))

    assert "raises the negative log-likelihood here by 0.02 nats" in price(0.02)
    assert "lowers the negative log-likelihood here by 0.03 nats" in price(-0.03)
    assert "as it was" in price(0.0)
    assert "allowed a rise of 0.01 on" in price(0.02)


def test_answers_are_told_in_the_targets_unit():
    subject = report_cases.table()  # 300 + 80 y
    assert highest_scores.prediction_words(subject, Answer((1.5,), (0.5,), (0.52,), (2.48,), (0.1,))) == "420 ± 78"
    assert highest_scores.target_words(subject, (-1.0,)) == "220"
    moons = report_cases.two_moons()
    assert highest_scores.prediction_words(moons, Answer((0.2, 0.8), (), (), (), (0.1,))) == "lower (80 %)"
    assert highest_scores.target_words(moons, (0.0,)) == "upper"


def test_rare_examples_are_told_by_their_p_value():
    examples = examples_of("table")
    first = highest_scores.measure(examples)[0]

    def told(p):
        changed = first._replace(explanation=replace(first.explanation, p_value=p))
        return highest_scores.told(examples, changed)[1]

    assert "p = 0.0066: it scores higher than all 150 held-out examples" in told(1 / 151)
    assert "p = 0.013: about 1.3 % of held-out examples score as high" in told(2 / 151)
    assert "Number 1 by score of 150 held-out" in highest_scores.told(examples_of("two_moons"), first)[1]


def test_neighbours_of_rows_are_nearest_in_the_table_and_those_of_images_where_it_was_decided():
    """Of the moons some are far between features."""
    decided = set()
    for name in ("table", "two_moons"):
        subject = examples_of(name).subject
        inputs = subject.held_out.x if subject.new is None else subject.new
        for each in highest_scores.measure(examples_of(name)):
            distances = (subject.train.x - inputs[each.row]).norm(dim=1).sort().values[:3]
            assert_close(doubles([near.distance for near in each.nearest]).float(), distances, atol=1e-4, rtol=1e-4)
            decided.add(each.explanation.farthest.space)
    assert decided == {"features", "inputs"}
    for each in highest_scores.measure(examples_of("images")):
        assert tuple(near.distance for near in each.nearest) == each.explanation.farthest.nearest.distances


def test_in_short_compares_intervals_with_those_near_the_data():
    examples, found = examples_of("table"), away_of("table")
    sure = how_sure.measure(examples)
    new = found.others[0]._replace(before=90.0, after=200.0, flagged=0.5, flagged_before=100.0, flagged_after=400.0)
    changed = found._replace(others=(new,), held_out=found.held_out._replace(after=80.0))
    told, after = in_short(examples, sure, changed), sure.after
    assert "2.5 times as wide as there" in told
    assert f"on average ± {number(after.width / 2)}, hold {percent(after.coverage)} of the true" in told
    assert "50 % of those examples are flagged" in told.replace("\u00a0", " ")
    assert "with intervals 5 times as wide" in told
    nearly = changed._replace(others=(new._replace(after=83.0, flagged_after=83.0),))
    assert "a typical interval is about as wide as there" in in_short(examples, sure, nearly)
    assert "with intervals about as wide" in in_short(examples, sure, nearly)
    assert "on these half of its 95 % intervals are wider than 400 (100 without" in how_far(examples, changed).replace(
        "\u00a0", " "
    )
    none = changed._replace(others=(new._replace(flagged=0.0, flagged_before=None, flagged_after=None),))
    assert "on all of them half of its" in how_far(examples, none)
    assert "with intervals" not in in_short(examples, sure, none)


def test_where_nothing_can_be_flagged_nothing_is_said_of_flags():
    for name in ("two_moons", "table"):
        examples, found = examples_of(name), away_of(name)
        few = found._replace(score=found.score._replace(line=None))
        short = in_short(examples, how_sure.measure(examples), few)
        assert "none can be flagged" in short
        assert "nothing can be flagged" in away_from_data.flags(examples, few)
        assert "are flagged" not in how_far(examples, few) + short
    assert "none can be flagged" in how_far(examples, few)


def test_a_p_value_of_five_per_cent_is_flagged():
    """In single precision a twentieth is more than 0.05."""
    subject = examples_of("table").subject
    evidence = subject.calibrated.evidence
    few = replace(subject.calibrated, evidence=replace(evidence, held_out=evidence.held_out[:19]))
    examples = gather(replace(subject, calibrated=few))
    found = away_from_data.measure(examples)
    assert found.others[0].flagged == float((few(subject.new).ood_score > found.score.line).double().mean()) > 0.4
    assert highest_scores.measure(examples)[0].explanation.p_value == 0.05


def test_the_radius_is_told_of_one_space_or_of_all():
    found = away_of("table")
    assert len(found.spaces) == 2
    data = found.spaces[0]
    assert "inside it in every space stay as they were" in away_from_data.radius(found, data)
    assert "predictions there stay" in away_from_data.radius(found._replace(spaces=(data,)), data)
    assert "every distance counts" in away_from_data.radius(found, data._replace(line=None))


# --- what is measured


def test_noise_fills_a_box_three_times_as_wide():
    train = report_cases.table().train.x
    noise = others_of(replace(report_cases.table(), new=None), 2000)[0].x
    low, high = train.amin(0), train.amax(0)
    place = (noise - low) / (high - low)
    assert float(place.min()) == pytest.approx(-1, abs=0.05)
    assert float(place.max()) == pytest.approx(2, abs=0.05)


@pytest.mark.parametrize(
    ("adjust", "proper"),
    [(Reweight(), False), (Reweight(normalise=True), True), (Reweight(complete=True), True)],
    ids=["as they are", "normalise", "complete"],
)
def test_whether_weighted_predictions_sum_to_one(adjust, proper):
    subject = report_cases.reweighted()
    train, held_out = ((data.x, data.y) for data in (subject.train, subject.held_out))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DapcalWarning)
        calibrated = calibrate(subject.calibrated.posterior, train=train, held_out=held_out, adjust=adjust, guard=None)
        calibrated = replace(calibrated, phi=subject.calibrated.phi)
        found = weights.measure(gather(replace(subject, calibrated=calibrated)))
        total = calibrated(others_of(subject, 100)[0].x).probs.sum(-1)
    assert bool((total - 1).abs().max() < 1e-4) == proper == found.is_proper
    assert found.total_weight[0] < 0.9
    told = " ".join(weights.told(found))
    assert ("do not sum to one" in told) != proper
    near = found._replace(is_weighted=True, least_ess=30.0, total_weight=(1.0, 1.0), collapsed=0.0)
    assert "instead of weighting" not in " ".join(weights.told(near))


def test_the_likelihood_is_that_of_targets_as_people_see_them():
    subject = examples_of("table").subject
    found = judges(subject, 10_000)
    y, prediction = subject.held_out.y[found.rows], subject.calibrated(subject.held_out.x[found.rows])
    price = Normal(300 + 80 * prediction.mean.double(), 80 * prediction.variance.double().sqrt())
    expected = float(-price.log_prob(300 + 80 * y.double()).mean())
    assert accuracy.measure(examples_of("table")).after.nll == pytest.approx(expected, rel=1e-5)
    own, curve = subject.calibrated.curve, phi.measure(examples_of("table"))
    assert_close(curve.nll - curve.base_nll, own.nll - own.base_nll)
    assert curve.base_nll == pytest.approx(own.base_nll + math.log(80))
    assert curve.guard - curve.base_nll == pytest.approx(own.guard - own.base_nll)


@pytest.mark.parametrize("beside", [0, 1])
def test_the_page_says_where_single_columns_make_flags(beside):
    examples = examples_of("table")
    calibrated = examples.subject.calibrated
    checked = replace(calibrated, evidence=replace(calibrated.evidence, beside=beside))
    given = replace(examples, subject=replace(examples.subject, calibrated=checked))
    told = away_from_data.section(given, away_of("table"))
    assert ("the values of single columns" in told) == (beside > 0)
    assert ("One unusual column" in told) == (beside > 0)
