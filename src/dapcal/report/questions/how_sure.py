"""Does it know how good it is? Reliability of confidences, or coverage of intervals, on held-out data."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dapcal import metrics
from dapcal.report.examples import Examples
from dapcal.report.kit.histograms import outline
from dapcal.report.kit.markup import Captioned, figures, legend, paragraph
from dapcal.report.kit.numbers import number, percent
from dapcal.report.kit.svg import HEIGHT, Plot, Scale, covering
from dapcal.report.predictions import Answers

BINS = 10
LEVELS = tuple(round(0.05 * step, 2) for step in range(1, 20))
Line = tuple[str, str, str]
"""A line of the table of quality: its name, its value, and what it should be."""
_REPEATS = 200
_KOLMOGOROV = 1.36  # largest gap times √n that chance exceeds in 5 % of cases
_UNIT = Scale(0, 1)


class Reliability(NamedTuple):
    """How often the most likely class is right, by how sure the model is; of labels each counts for itself."""

    accuracy: float
    confidence: float  # mean largest probability
    ece: float
    ece_by_chance: tuple[float, float]  # if confidences were exactly right: on average, and in 95 % of cases at most
    bin_confidence: tuple[float, ...]  # NaN where a bin is empty
    bin_accuracy: tuple[float, ...]
    bin_counts: tuple[int, ...]
    is_of_labels: bool = False

    def lines(self) -> list[Line]:
        """Of the table of quality."""
        chance = f"0; about {number(self.ece_by_chance[0], 2)} by chance with so many examples"
        return [
            ("average confidence", percent(self.confidence), "equal to the share right"),
            ("expected calibration error", number(self.ece, 2), chance),
        ]

    def told(self, count: int) -> str:
        """The end of the sentence that `accuracy` begins."""
        gap = self.confidence - self.accuracy
        agrees = "agrees with that, within chance"
        if self.ece > self.ece_by_chance[1]:
            agrees = "agrees with that on average, but not at every level of confidence"
        if abs(gap) > 2 * error_of(self.accuracy, count):
            agrees = "is higher than that: it is overconfident" if gap > 0 else "is lower than that: it is too cautious"
        return f"; its average confidence, {percent(self.confidence)}, {agrees}"

    def in_short(self) -> str:
        """What to expect near the data."""
        if self.is_of_labels:
            return f"Of its labels {percent(self.accuracy)} are right on data like its training data"
        return f"It is right {percent(self.accuracy)} of the time on data like its training data"


class Coverage(NamedTuple):
    """How many targets lie inside intervals, and where in their predicted distributions."""

    coverage: float  # of 95 % intervals
    width: float  # of 95 % intervals, mean, as people see the target
    observed: tuple[float, ...]  # coverage at `LEVELS`
    pit_counts: tuple[int, ...]  # targets by the decile of their predictive distribution

    def lines(self) -> list[Line]:
        """Of the table of quality."""
        return [
            ("targets inside 95 % intervals", percent(self.coverage), "95 %"),
            ("mean width of 95 % intervals", number(self.width), "small, if the line above holds"),
        ]

    def told(self, count: int) -> str:
        """The end of the sentence that `accuracy` begins."""
        gaps = [observed - level for observed, level in zip(self.observed, LEVELS, strict=True)]
        verdict = "intervals of all levels keep what they promise, within chance"
        if max(map(abs, gaps)) > _KOLMOGOROV / math.sqrt(count):
            verdict = "taken over all levels, intervals are too " + ("wide" if sum(gaps) > 0 else "narrow")
        return f", and its 95 % intervals hold {percent(self.coverage)} of the true values; {verdict}"

    def in_short(self) -> str:
        """What to expect near the data."""
        kept = f"hold {percent(self.coverage)} of the true values on data like its training data"
        return f"Its 95 % intervals, on average ± {number(self.width / 2)}, {kept}"


class ClassSureness(NamedTuple):
    """Of class probabilities, before and after."""

    before: Reliability
    after: Reliability

    def drawn(self, count: int) -> str:  # noqa: ARG002
        """A diagram of each."""
        lead = (
            "When it says 80 %, is it right in 80 of 100 cases? Dots on the dashed line mean yes; below it the model "
            "is overconfident. The bars through the dots span what chance may do. Underneath: how many examples each "
            "dot stands for."
        )
        before, after = (f"Expected calibration error {number(each.ece, 2)}." for each in self)
        return paragraph(lead) + figures(
            [
                Captioned(_reliability_chart(self.before, "before"), "Before", before),
                Captioned(_reliability_chart(self.after, "after"), "After", after),
            ]
        )


class NumberSureness(NamedTuple):
    """Of Gaussian predictions, before and after."""

    before: Coverage
    after: Coverage

    def drawn(self, count: int) -> str:
        """Both in one chart of coverage, and in one of deciles; of `count` examples."""
        lead = (
            "Of intervals that promise 80 %, do 80 of 100 hold the true value? A line on the dashed one means yes; "
            "below it intervals are too narrow. The grey bands span what chance may do."
        )
        deciles = "In their predicted distributions. Even bars are right; a hump means too cautious, a bowl too sure."
        return (
            paragraph(lead)
            + legend((("before", "before"), ("after", "after")))
            + figures(
                [
                    Captioned(_coverage_chart(*self, count), "Promised and kept", "Coverage of central intervals."),
                    Captioned(_decile_chart(*self, count), "Where the true values fall", deciles),
                ]
            )
        )


Sureness = ClassSureness | NumberSureness


def measure(examples: Examples) -> Sureness:
    """Against the targets of the held-out examples."""
    before, after = examples.held_out.before, examples.held_out.after
    if examples.subject.is_classification:
        return ClassSureness(_reliability(examples, before), _reliability(examples, after))
    return NumberSureness(_coverage(examples, before), _coverage(examples, after))


def section(examples: Examples, found: Sureness) -> str:
    """The diagrams."""
    return found.drawn(examples.count) + paragraph(examples.origin, "small")


def error_of(share: float, count: int) -> float:
    """Standard error of a share; a share of 1 is not known exactly either."""
    smoothed = (share * count + 1) / (count + 2)
    return math.sqrt(smoothed * (1 - smoothed) / count)


def _reliability(examples: Examples, answers: Answers) -> Reliability:
    """Of class probabilities (N, K) and classes (N,), or of every label."""
    probs, y = answers.mean, examples.y
    if examples.subject.has_labels:
        decided = examples.subject.likelihood.decisions(probs, y)
        assert decided is not None
        probs, y = decided
    confidence = probs.max(-1).values
    diagram = metrics.reliability(probs, y, BINS)
    return Reliability(
        accuracy=metrics.accuracy(probs, y),
        confidence=float(confidence.mean()),
        ece=metrics.expected_calibration_error(probs, y, BINS),
        ece_by_chance=_ece_by_chance(confidence),
        bin_confidence=tuple(diagram.confidence.tolist()),
        bin_accuracy=tuple(diagram.accuracy.tolist()),
        bin_counts=tuple(diagram.counts.tolist()),
        is_of_labels=examples.subject.has_labels,
    )


def _ece_by_chance(confidence: Tensor) -> tuple[float, float]:
    """Mean and 95 % quantile of the expected calibration error when each confidence is right exactly that often."""
    generator = torch.Generator().manual_seed(0)
    confidence = confidence.clamp(0, 1)
    index = torch.bucketize(confidence, torch.linspace(0, 1, BINS + 1, dtype=torch.float64)[1:-1])
    errors = []
    for _ in range(_REPEATS):
        right = (torch.rand(len(confidence), generator=generator, dtype=torch.float64) < confidence).double()
        errors.append(torch.bincount(index, right - confidence, minlength=BINS).abs().sum() / len(confidence))
    found = torch.stack(errors)
    return float(found.mean()), float(found.quantile(0.95))


def _coverage(examples: Examples, answers: Answers) -> Coverage:
    """Of means and variances (N, K) for targets (N, K)."""
    mean, variance, y = answers.mean, answers.variance, examples.y
    likelihood = examples.subject.likelihood

    def interval(level: float) -> tuple[Tensor, Tensor]:
        return likelihood.interval_of(mean, variance, level)

    pit = likelihood.place_of(mean, variance, y).flatten()
    return Coverage(
        coverage=metrics.coverage(*interval(0.95), y),
        width=metrics.mean_width(*(torch.from_numpy(examples.subject.unit.amounts(end)) for end in interval(0.95))),
        observed=tuple(metrics.coverage(*interval(level), y) for level in LEVELS),
        pit_counts=tuple(torch.histc(pit, BINS, 0, 1).long().tolist()),
    )


def _reliability_chart(found: Reliability, when: str) -> str:
    """Over how many inputs each bin holds; from 1/2 where no confidence lies under it, as of two classes."""
    least = 0.0 if any(found.bin_counts[: BINS // 2]) else 0.5
    shown = Scale(least, 1)
    plot = Plot(shown, _UNIT, bottom=96)
    counts = Plot(shown, Scale(0, max(found.bin_counts)), top=HEIGHT - 78)
    parts = [plot.line([(least, least), (1, 1)], "ideal", "as often right as it says")]
    for place, count in enumerate(found.bin_counts):
        if not count:
            continue
        said, right = found.bin_confidence[place], found.bin_accuracy[place]
        words = f"{count} examples: says {percent(said)}, is right {percent(right)}"
        error = 2 * math.sqrt(max(right * (1 - right), 0.25 / count) / count)
        parts += [
            counts.bar(place / BINS, (place + 1) / BINS, count, f"{when} soft", words),
            plot.line([(said, max(right - error, 0)), (said, min(right + error, 1))], f"{when} error"),
            plot.dot(said, right, when, words),
        ]
    label = f"Reliability {when} calibration: expected calibration error {number(found.ece)}"
    axes = plot.y_axis("share right", percent=True) + counts.x_axis("how sure it is", percent=True)
    return plot.drawing(label, axes, counts.y_axis("examples"), *parts)


def _coverage_chart(before: Coverage, after: Coverage, count: int) -> str:
    """Share of targets inside their intervals, against what the intervals promise."""
    plot = Plot(_UNIT, _UNIT)
    lower, upper = (
        [(level, level + sign * 2 * math.sqrt(level * (1 - level) / count)) for level in LEVELS] for sign in (-1, 1)
    )
    parts = [plot.clipped(plot.area(lower, upper, "band")), plot.line([(0, 0), (1, 1)], "ideal", "as many as promised")]
    for found, when in ((before, "before"), (after, "after")):
        points = list(zip(LEVELS, found.observed, strict=True))
        parts.append(plot.line([(0, 0), *points, (1, 1)], when))
        parts += [
            plot.dot(level, seen, when, f"{when}: {percent(level)} promised, {percent(seen)} inside", 2.5)
            for level, seen in points
        ]
    axes = plot.axes("what intervals promise", "targets inside", x_percent=True, y_percent=True)
    return plot.drawing(f"Coverage of 95 % intervals after calibration: {percent(after.coverage)}", axes, *parts)


def _decile_chart(before: Coverage, after: Coverage, count: int) -> str:
    """Targets of `count` inputs by the decile of their predictive distribution: as many in each where it is right."""
    targets = sum(after.pit_counts)
    share, error = 1 / BINS, 2 * math.sqrt((1 / BINS) * (1 - 1 / BINS) / count)
    shares = [[inside / targets for inside in found.pit_counts] for found in (before, after)]
    plot = Plot(_UNIT, covering([share + error, *shares[0], *shares[1]], floor=0.0))
    parts = [
        plot.bar(place / BINS, (place + 1) / BINS, value, "after", f"after: {percent(value)} of the targets")
        for place, value in enumerate(shares[1])
    ]
    ends = [(0.0, share), (1.0, share)]
    band = plot.area([(x, y - error) for x, y in ends], [(x, y + error) for x, y in ends], "band")
    parts.append(plot.clipped(band))
    parts.append(plot.line(ends, "ideal", "as it should be"))
    parts.append(plot.line(outline(shares[0], [place / BINS for place in range(BINS + 1)]), "before"))
    axes = plot.axes("place in the predicted distribution", "share of targets", x_percent=True, y_percent=True)
    return plot.drawing("Histogram of the places of targets in their predicted distributions", axes, *parts)
