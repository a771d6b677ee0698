"""Reports: their numbers against dapcal.metrics and brute force, their markup against a parser."""

from __future__ import annotations

import base64
import hashlib
import re
import struct
import warnings
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

import report_cases
from cases import doubles
from dapcal import calibrate, metrics
from dapcal.data import Labelled, split
from dapcal.likelihoods import Bernoulli, Categorical, Gaussian
from dapcal.models.subject import Axis, Picture, Subject
from dapcal.png import image_png
from dapcal.posteriors import laplace
from dapcal.report import Unit, write
from dapcal.report.examples import gather, judges, others_of
from dapcal.report.headline import how_good, in_short
from dapcal.report.kit.colors import palette, palette_png
from dapcal.report.kit.svg import Plot, Scale
from dapcal.report.page import page
from dapcal.report.questions import accuracy, away_from_data, doubtful, highest_scores, how_sure, plane, weights
from dapcal.report.questions.how_sure import LEVELS
from dapcal.types import DapcalWarning

CASES = {
    "moons": report_cases.two_moons,
    "table": report_cases.table,
    "images": report_cases.images,
    "one column": report_cases.one_column,
    "weights": report_cases.reweighted,
}
NASTY = '<img src="x" onerror="alert(1)">&"\''


@pytest.fixture(scope="module")
def examples():
    return {name: gather(make()) for name, make in CASES.items()}


@pytest.fixture(scope="module")
def pages(examples):
    return {name: page(found) for name, found in examples.items()}


def page_of(subject):
    return page(gather(subject))


def unseen_half(subject, seed):
    rows = split(len(subject.held_out.x), torch.Generator().manual_seed(seed))[1].sort().values
    return subject.held_out.subset(rows)


# --- which held-out inputs judge


@pytest.mark.parametrize(("name", "seed"), [("moons", 0), ("table", 0), ("images", 0), ("one column", 7)])
def test_the_half_that_had_no_say_in_phi_is_found(name, seed):
    subject = CASES[name]()
    found = judges(subject, 10_000)
    expected = split(len(subject.held_out.x), torch.Generator().manual_seed(seed))[1].sort().values
    assert found.are_independent
    assert torch.equal(found.rows, expected)


def test_other_held_out_data_are_judged_as_a_whole():
    subject = report_cases.two_moons()
    data = subject.held_out
    other = replace(subject, held_out=Labelled(data.x[1:], data.y[1:]))
    found = judges(other, 10_000)
    assert (found.are_independent, len(found.rows)) == (False, len(data.x) - 1)
    assert "which half is not known" in page_of(other)


def test_a_file_of_an_earlier_version_does_not_say_which_half_judges():
    subject = report_cases.two_moons()
    old = replace(subject, calibrated=replace(subject.calibrated, chooses=None, judges=None))
    assert not judges(old, 10_000).are_independent
    assert "which half is not known" in page_of(old)
    told = judges(replace(old, judges=torch.tensor([5, 2])), 10_000)
    assert told.are_independent
    assert told.rows.tolist() == [2, 5]


def test_at_most_so_many_are_judged():
    subject = report_cases.two_moons()
    found = judges(subject, 40)
    assert found.are_independent
    assert len(found.rows.unique()) == 40


# --- quality


def test_class_numbers_are_those_of_the_metrics(examples):
    given = examples["moons"]
    held = unseen_half(given.subject, 0)
    prediction = given.subject.calibrated(held.x)
    found = zip(accuracy.measure(given), how_sure.measure(given), doubtful.measure(given), strict=True)
    for (good, sure, risk), told in zip(found, (prediction.base, prediction), strict=True):
        probs = told.probs.double()
        assert good.accuracy == sure.accuracy == metrics.accuracy(probs, held.y)
        assert good.brier == pytest.approx(metrics.brier(probs, held.y))
        assert sure.ece == pytest.approx(metrics.expected_calibration_error(probs, held.y, 10))
        assert good.nll == pytest.approx(float(-told.log_prob(held.y).mean()), rel=1e-5)
        assert sum(sure.bin_counts) == len(held.x) == given.count
        doubt, wrong = 1 - probs.max(-1).values, (probs.argmax(-1) != held.y).double()
        assert_close(doubles(risk.risk), metrics.selective_risk(doubt, wrong).risk)


def test_number_numbers_are_those_of_the_metrics_in_the_targets_unit(examples):
    given = examples["table"]
    held = unseen_half(given.subject, 0)
    prediction = given.subject.calibrated(held.x)
    found = zip(accuracy.measure(given), how_sure.measure(given), doubtful.measure(given), strict=True)
    for (good, sure, risk), told in zip(found, (prediction.base, prediction), strict=True):
        mean, variance = 300 + 80 * told.mean.double(), 80**2 * told.variance.double()
        y = 300 + 80 * held.y.double()
        assert good.rmse == pytest.approx(metrics.rmse(mean, y), rel=1e-5)
        assert good.crps == pytest.approx(metrics.crps_gaussian(mean, variance, y), rel=1e-5)
        for level, observed in zip((*LEVELS, 0.95), (*sure.observed, sure.coverage), strict=True):
            assert observed == metrics.coverage(*told.interval(level), held.y)
        assert sure.width == pytest.approx(80 * metrics.mean_width(*told.interval(0.95)), rel=1e-5)
        place = torch.distributions.Normal(mean, variance.sqrt()).cdf(y)
        assert list(sure.pit_counts) == (10 * place).long().flatten().bincount(minlength=10).tolist()
        doubt, squared = variance.mean(-1), ((mean - y) ** 2).mean(-1)
        assert_close(doubles(risk.risk), metrics.selective_risk(doubt, squared).risk.sqrt(), rtol=1e-4, atol=0)
        assert risk.risk[-1] == pytest.approx(good.rmse)


def test_calibration_error_by_chance_is_that_of_labels_drawn_from_the_confidences(examples):
    subject = examples["moons"].subject
    probs = subject.calibrated(unseen_half(subject, 0).x).probs.double()
    generator = torch.Generator().manual_seed(1)
    label = probs.argmax(-1)
    drawn = []
    for _ in range(200):
        right = torch.rand(len(probs), generator=generator, dtype=torch.float64) < probs.max(-1).values
        drawn.append(metrics.expected_calibration_error(probs, torch.where(right, label, 1 - label), 10))
    mean, most = how_sure.measure(examples["moons"]).after.ece_by_chance
    assert mean == pytest.approx(doubles(drawn).mean().item(), abs=3 * doubles(drawn).std().item() / 10)
    assert most == pytest.approx(doubles(drawn).quantile(0.95).item(), rel=0.15)


# --- distances, scores, behaviour


def test_training_distances_leave_the_input_itself_out(examples):
    subject = examples["moons"].subject
    inputs = next(data for data in away_from_data.measure(examples["moons"]).spaces if data.name == "inputs")
    x = subject.train.x.double()
    nearest = torch.cdist(x, x).fill_diagonal_(torch.inf).min(1).values
    assert_close(doubles(dict(inputs.samples)["training"]).sort().values, nearest.sort().values, atol=1e-5, rtol=1e-4)
    space = next(s for s in subject.calibrated.distance.spaces if s.name == "inputs")
    assert inputs.line == space.radius.start


@pytest.mark.parametrize("name", ["moons", "table", "one column"])
def test_the_line_on_the_score_is_where_p_is_five_per_cent(examples, name):
    found, evidence = away_from_data.measure(examples[name]), examples[name].subject.calibrated.evidence
    scores = torch.cat([evidence.held_out, evidence.held_out + 1e-9, torch.linspace(-5, 50, 500)]).double()
    assert torch.equal(evidence.p_value(scores) <= 0.05, scores > found.score.line)


def test_too_few_held_out_inputs_give_no_line(examples):
    subject = examples["moons"].subject
    few = replace(subject.calibrated.evidence, held_out=subject.calibrated.evidence.held_out[:18])
    given = gather(replace(subject, calibrated=replace(subject.calibrated, evidence=few)))
    assert away_from_data.measure(given).score.line is None
    assert "Too few held-out examples" in page(given)


def test_behaviour_on_new_data(examples):
    given = examples["table"]
    prediction = given.subject.calibrated(given.subject.new)
    (new,) = away_from_data.measure(given).others
    assert new.examples == 120
    assert new.flagged == pytest.approx(float((prediction.ood_p_value <= 0.05).float().mean()))
    assert new.far == pytest.approx(float((prediction.pre_distance > 0).float().mean()))
    lower, upper = prediction.interval(0.95)
    assert new.after == pytest.approx(80 * float((upper - lower).median()), rel=1e-5)
    flagged = prediction.ood_p_value <= 0.05
    assert new.flagged_after == pytest.approx(80 * float((upper - lower)[flagged].median()), rel=1e-5)
    lower, upper = prediction.base.interval(0.95)
    assert new.flagged_before == pytest.approx(80 * float((upper - lower)[flagged].median()), rel=1e-5)
    assert not given.is_made_up


def test_without_new_data_outliers_are_made_up_and_called_so(examples, pages):
    assert [other.name for other in examples["moons"].others] == ["noise", "scrambled"]
    assert [other.name for other in examples["one column"].others] == ["noise"]
    assert "made-up" in pages["moons"]
    assert "made-up" not in pages["table"]


# --- the highest scores


def test_examples_shown_are_those_of_the_highest_scores(examples):
    subject, found = examples["table"].subject, highest_scores.measure(examples["table"])
    scores = subject.calibrated(subject.new).ood_score
    assert [each.row for each in found] == scores.argsort(descending=True)[:6].tolist()
    assert all(each.row >= 60 for each in found)  # the rows of another kind
    first = found[0]
    assert first.shown == report_cases.shown_rows(subject.new[first.row : first.row + 1])[0]
    row = first.explanation.nearest.rows[0]
    assert first.nearest[0].shown == report_cases.shown_rows(subject.train.x[row : row + 1])[0]
    assert first.nearest[0].target == pytest.approx(subject.train.y[row].tolist())
    assert first.target == ()


def test_far_columns_are_marked(pages):
    marked = re.findall(r'<tr class="far"><th scope="row">([^<]+)<', pages["table"])
    assert {"area", "distance to centre"} <= set(marked)


def test_held_out_examples_have_their_targets(examples):
    held = examples["moons"].subject.held_out
    for each in highest_scores.measure(examples["moons"]):
        assert each.target == (float(held.y[each.row]),)


# --- the map


def test_the_map_is_what_the_model_says(examples):
    found, subject = plane.measure(examples["moons"]), examples["moons"].subject
    across = torch.linspace(found.low[0], found.high[0], 96)
    up = torch.linspace(found.low[1], found.high[1], 96)
    rows, columns = torch.tensor([0, 40, 95]), torch.tensor([0, 50, 95])
    shown = torch.stack([across[columns], up.flip(0)[rows]], 1)
    x = (shown - torch.tensor([100.0, 50.0])) / 10
    prediction = subject.calibrated(x)
    for place, given in ((found.chosen, prediction), (0, prediction.base)):
        values = found.frames[place].values[rows, columns]
        assert_close(values.float(), given.probs.max(-1).values, atol=1e-4, rtol=1e-4)
    assert found.frames[found.chosen].phi == pytest.approx(subject.calibrated.phi)
    assert found.frames[0].phi is None
    averages = [float(frame.values.mean()) for frame in found.frames]
    assert averages == sorted(averages, reverse=True)  # the more distance counts, the less sure


def test_the_map_of_a_regression_shows_the_epistemic_deviation():
    x, y = torch.randn(200, 2), torch.randn(200, 1)
    train, held = Labelled(x[:100], y[:100]), Labelled(x[100:], y[100:])
    calibrated = report_cases.calibrated_ensemble(train, held, Gaussian(), 1, epochs=5)
    subject = Subject(calibrated, train, held, "t", "y", lambda x: [{"a": "1"} for _ in x], unit=Unit(0.0, -3.0))
    found = plane.measure(gather(subject))
    corner = torch.tensor([[found.low[0], found.high[1]]])
    expected = 3 * calibrated(corner).epistemic.sqrt()
    assert float(found.frames[found.chosen].values[0, 0]) == pytest.approx(float(expected), rel=1e-3)
    assert found.axes == (Axis("first input"), Axis("second input"))


def test_only_two_numbers_have_a_map(examples):
    assert [name for name, given in examples.items() if plane.measure(given) is not None] == ["moons", "weights"]


# --- weights


def test_inflate_has_no_weights_and_says_why_this_is_fine(examples, pages):
    assert not weights.measure(examples["moons"]).is_weighted
    assert "no importance weights that could collapse" in pages["moons"]


def test_weights_are_judged(examples, pages):
    found = weights.measure(examples["weights"])
    assert found.is_weighted
    assert 1 <= found.least_ess < found.draws == 30
    assert found.largest_k is not None
    assert found.total_weight[0] < 0.99
    assert "Effective draws: at worst" in pages["weights"]
    assert "do not sum to one" in pages["weights"]
    subject = examples["weights"].subject
    x = torch.cat([unseen_half(subject, 0).x, *(each.x for each in others_of(subject, 2000))])
    with pytest.warns(DapcalWarning, match="collapsed") as caught:
        subject.calibrated(x)
    (counted,) = re.findall(r"at (\d+) of (\d+) inputs", str(caught[0].message))
    assert found.collapsed == pytest.approx(int(counted[0]) / int(counted[1]), abs=0.003)
    assert "the weights have collapsed" in pages["weights"]


# --- markup


class Reader(HTMLParser):
    """Collects tags, and whether each is closed in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.tags, self.problems = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(tag)


def read(text):
    reader = Reader()
    reader.feed(text)
    assert not reader.problems
    assert not reader.open
    return reader.tags


@pytest.mark.parametrize("name", CASES)
def test_pages_are_well_formed_and_load_nothing(pages, name):
    tags = read(pages[name])
    for tag, attributes in tags:
        for key in ("src", "href"):
            if key in attributes:
                assert attributes[key].startswith(("data:image/png;base64,", "#")), (tag, attributes[key][:80])
        assert not any(key.startswith("on") or key == "style" for key in attributes)
    kinds = [tag for tag, _ in tags]
    assert [kinds.count(kind) for kind in ("script", "style", "h1", "main", "header", "footer")] == [1] * 6
    assert {"link", "iframe", "object", "base", "form"}.isdisjoint(kinds)
    assert "http:" not in pages[name].lower()
    assert "https:" not in pages[name].lower()
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    linked = [attributes["href"][1:] for tag, attributes in tags if tag == "a"]
    assert set(linked) <= set(ids)
    assert kinds.count("table") == kinds.count("caption")
    assert all("aria-label" in attributes for tag, attributes in tags if attributes.get("role") == "img")
    assert all(attributes.get("alt") for tag, attributes in tags if tag == "img")
    assert "nan" not in re.sub(r"base64,[^\"]*", "", pages[name].split("<body>")[1]).lower().split()


def test_the_policy_names_the_style_and_the_script(pages):
    for kind in ("style", "script"):
        (content,) = re.findall(f"<{kind}>(.*?)</{kind}>", pages["moons"], re.S)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in pages["moons"]
    assert "default-src 'none'" in pages["moons"]


def test_all_words_are_escaped():
    subject = report_cases.table()
    columns = tuple(f"{NASTY}{name}" for name in subject.features)
    calibrated = replace(subject.calibrated, notes=(NASTY,))

    def show(x):
        return [{f"{NASTY}{name}": NASTY for name in subject.features} for _ in x]

    words = {"title": NASTY, "target": NASTY, "new_name": NASTY, "features": columns, "show": show}
    text = page_of(replace(subject, calibrated=calibrated, **words))
    assert "<img" not in text
    read(text)
    moons = report_cases.two_moons()
    text = page_of(replace(moons, classes=(NASTY, NASTY + "2"), axes=(Axis(NASTY), Axis(NASTY))))
    assert "<img" not in text
    read(text)


def test_new_data_cannot_take_the_name_of_another_sample():
    given = gather(replace(report_cases.images(), new_name="held-out"))
    assert [name for name, _ in given.named] == ["held-out", "held-out (new)"]
    read(page(given))


@pytest.mark.parametrize("name", CASES)
def test_files_are_small(pages, name):
    assert len(pages[name].encode()) < 500_000


def test_files_stay_small_whatever_the_data():
    subject = report_cases.table()
    wide = {f"column {place}": "long " * 1000 for place in range(500)}
    many = subject.new.repeat(200, 1)  # 24,000 rows
    text = page_of(replace(subject, show=lambda x: [wide for _ in x], new=many, target="t" * 10_000))
    assert len(text.encode()) < 500_000
    assert "5,000 of 24,000, drawn at random" in text
    assert "488 more are not shown" in text
    images = report_cases.images()
    text = page_of(replace(images, show=lambda x: [Picture(bytes(10**6)) for _ in x]))
    assert len(text.encode()) < 500_000
    assert "picture of 1000 kB left out" in text


def test_write_writes_the_page(tmp_path, pages):
    write(report_cases.images(), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == pages["images"]
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_the_headline_has_the_numbers(examples, pages):
    found = accuracy.measure(examples["images"]).after
    assert f"it is right {100 * found.accuracy:.0f}" in pages["images"].replace("100.0", "100")
    assert "had no say in choosing φ" in pages["images"]


def test_the_headline_says_what_the_numbers_say(examples):
    moons = examples["moons"]

    def told(given, **changes):
        sure = how_sure.measure(given)
        return how_good(given, accuracy.measure(given), sure._replace(after=sure.after._replace(**changes)))

    assert "overconfident" in told(moons, accuracy=0.8, confidence=0.95)
    assert "too cautious" in told(moons, accuracy=0.95, confidence=0.8)
    assert "within chance" in told(moons, accuracy=0.9, confidence=0.91, ece=0.01)
    assert "not at every level" in told(moons, accuracy=0.9, confidence=0.91, ece=0.3)
    assert "too narrow" in told(examples["table"], observed=tuple(0.7 * level for level in LEVELS))
    assert "too wide" in told(examples["table"], observed=tuple(level**0.5 for level in LEVELS))
    assert "within chance" in told(examples["table"], observed=LEVELS)
    sure, away = how_sure.measure(moons), away_from_data.measure(moons)
    same = away._replace(others=(away.others[0]._replace(before=0.9, after=0.89),))
    assert "hardly changes" in in_short(moons, sure, same)
    assert "falls from" in in_short(moons, sure, away)


def test_bad_subjects():
    moons, table = report_cases.two_moons(), report_cases.table()
    with pytest.raises(ValueError, match="the names of classes or labels"):
        replace(moons, classes=())
    with pytest.raises(ValueError, match="none, as this is a regression"):
        replace(table, classes=("a",))
    with pytest.raises(ValueError, match="scale other than 0"):
        replace(table, unit=Unit(0.0, 0.0))
    with pytest.raises(ValueError, match="as in training"):
        replace(moons, new=torch.zeros(3, 5))


# --- other kinds of models


def test_two_targets():
    x = torch.randn(160, 3)
    data = [Labelled(part, torch.stack([part.sum(1), part[:, 0] ** 2], 1)) for part in (x[:80], x[80:])]
    calibrated = report_cases.calibrated_ensemble(*data, Gaussian(), 2, epochs=3)
    subject = Subject(calibrated, *data, "two", "both", lambda x: [{"a": "1"} for _ in x], unit=Unit(1.0, 2.0))
    given = gather(subject)
    held = unseen_half(subject, 0)
    expected = 2 * metrics.rmse(calibrated(held.x).mean, held.y)
    assert accuracy.measure(given).after.rmse == pytest.approx(expected, rel=1e-5)
    assert sum(how_sure.measure(given).after.pit_counts) == 80  # 40 examples of two targets
    read(page(given))


def test_one_logit():
    subject = report_cases.two_moons()
    data = subject.train, subject.held_out
    calibrated = report_cases.calibrated_ensemble(*data, Bernoulli(), 1, epochs=5)
    given = gather(replace(subject, calibrated=calibrated))
    held = unseen_half(subject, 0)
    assert accuracy.measure(given).after.accuracy == metrics.accuracy(calibrated(held.x).probs, held.y)
    read(page(given))


def test_closed_form_moments_have_no_draws_to_weight():
    subject = report_cases.two_moons()
    train, held_out = ((data.x, data.y) for data in (subject.train, subject.held_out))
    posterior = laplace.last_layer(subject.calibrated.posterior.network, Categorical(), train)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DapcalWarning)
        calibrated = calibrate(posterior, train=train, held_out=held_out)
    text = page_of(replace(subject, calibrated=calibrated))
    assert "in closed form" in text
    read(text)


def test_whole_numbers_as_inputs_are_only_scrambled():
    tokens = SimpleNamespace(new=None, train=Labelled(torch.arange(300).reshape(100, 3), torch.zeros(100)))
    made = others_of(tokens, 50)
    assert [each.name for each in made] == ["scrambled"]
    assert made[0].x.dtype == torch.long
    assert torch.equal(made[0].x % 3, torch.arange(3).expand(50, 3))  # every value stays in its column


# --- drawing


def test_pictures_decode_to_their_levels():
    values = torch.tensor([[0.0, 0.5], [1.0, 2.0], [-1.0, 0.25]])
    for png, kind in ((image_png(values[None]), 0), (palette_png(values, 0.0, 1.0), 3)):
        chunks = _chunks(png)
        assert struct.unpack(">IIBBBBB", chunks[b"IHDR"]) == (2, 3, 8, kind, 0, 0, 0)
        lines = zlib.decompress(chunks[b"IDAT"])
        assert [list(lines[i : i + 3]) for i in (0, 3, 6)] == [[0, 0, 128], [0, 255, 255], [0, 0, 64]]
    assert len(chunks[b"PLTE"]) == 768
    assert tuple(chunks[b"PLTE"][:3]) == palette(256)[0] == (68, 1, 84)


def _chunks(png):
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    found, place = {}, 8
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        kind, data = png[place + 4 : place + 8], png[place + 8 : place + 8 + length]
        (checksum,) = struct.unpack(">I", png[place + 8 + length : place + 12 + length])
        assert checksum == zlib.crc32(kind + data)
        found[kind] = data
        place += 12 + length
    return found


@pytest.mark.parametrize("scale", [Scale(-2, 7), Scale(-2, 700, unit=0.5), Scale(0, 1e-6), Scale(3, 3)])
def test_scales_run_from_end_to_end_and_back(scale):
    assert scale(scale.low) == 0
    assert scale(scale.high) == pytest.approx(1 if scale.high > scale.low else 0)
    for share in (0.0, 0.3, 1.0):
        assert scale(scale.back(share)) == pytest.approx(share if scale.high > scale.low else 0, abs=1e-9)
    ticks = scale.ticks(5)
    assert ticks == sorted(ticks)
    assert all(scale.low - 1e-9 <= tick <= scale.high + 1e-9 for tick in ticks)
    assert 1 <= len(ticks) <= 20


def test_ticks_are_written_with_as_many_digits_as_they_need():
    plot = Plot(Scale(0.25, 0.256), Scale(0, 1))
    labels = re.findall(r'class="tick middle">([^<]+)<', plot.x_axis("x"))
    assert labels == ["0.25", "0.251", "0.252", "0.253", "0.254", "0.255", "0.256"]
    plot = Plot(Scale(12.3450, 12.3454), Scale(0, 1))
    labels = re.findall(r'class="tick end">([^<]+)<', replace(plot, y=plot.x).y_axis("y"))
    assert labels == ["12.345", "12.3451", "12.3452", "12.3453", "12.3454"]


def test_far_values_stay_near_the_drawing():
    plot = Plot(Scale(0, 1), Scale(0, 1))
    assert plot.across(1e30) == plot.across(1)
    assert abs(plot.up(1e30)) < 2 * plot.height
