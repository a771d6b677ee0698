"""What if doubtful ones go to a person? The error among the examples that are kept."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from dapcal import metrics
from dapcal.report.examples import Examples
from dapcal.report.kit.markup import legend, paragraph, tag
from dapcal.report.kit.svg import Plot, Scale, covering
from dapcal.report.predictions import Answers

_LEAST_KEPT = 0.05  # the first few inputs alone say nothing


class Risk(NamedTuple):
    """Mean loss among the least doubtful share of inputs: the error rate, or the root mean square error."""

    kept: tuple[float, ...]
    risk: tuple[float, ...]


class Doubtful(NamedTuple):
    """By the doubt before, and by the doubt after."""

    before: Risk
    after: Risk


def measure(examples: Examples) -> Doubtful:
    """Against the targets of the held-out examples."""
    of = _of_classes if examples.subject.is_classification else _of_numbers
    return Doubtful(of(examples, examples.held_out.before), of(examples, examples.held_out.after))


def section(examples: Examples, found: Doubtful) -> str:
    """The curves."""
    lead = (
        "If the examples it is least sure of are handed to a person, how wrong is it on the rest? A curve that falls "
        "towards the left means that its doubt is worth listening to."
    )
    return (
        paragraph(lead)
        + legend((("before", "by the doubt before"), ("after", "by the doubt after")))
        + tag("figure", _chart(found, examples.subject.is_classification), class_="alone")
        + paragraph(examples.origin, "small")
    )


def _of_classes(examples: Examples, answers: Answers) -> Risk:
    likelihood = examples.subject.likelihood
    decided = likelihood.decisions(answers.mean, examples.y)
    assert decided is not None
    wrong = (decided.probs.argmax(-1) != decided.y).double().reshape(examples.count, -1).mean(1)
    curve = metrics.selective_risk(1 - likelihood.confidence(answers.mean), wrong)
    return Risk(tuple(curve.coverage.tolist()), tuple(curve.risk.tolist()))


def _of_numbers(examples: Examples, answers: Answers) -> Risk:
    unit = examples.subject.unit
    mean = unit.means(answers.mean)
    squared = torch.from_numpy((mean - unit.amounts(examples.y)) ** 2).mean(-1)
    variance = torch.from_numpy(unit.widths(answers.variance.sqrt(), mean) ** 2).mean(-1)
    curve = metrics.selective_risk(variance, squared)
    return Risk(tuple(curve.coverage.tolist()), tuple(math.sqrt(value) for value in curve.risk.tolist()))


def _chart(found: Doubtful, is_classification: bool) -> str:
    name = "share wrong among those kept" if is_classification else "error among those kept"
    curves = [[(kept, risk) for kept, risk in zip(*each, strict=True) if kept >= _LEAST_KEPT] for each in found]
    plot = Plot(Scale(0, 1), covering([risk for curve in curves for _, risk in curve], floor=0.0))
    lines = [plot.line(curve, when) for curve, when in zip(curves, ("before", "after"), strict=True)]
    axes = plot.axes("share of examples kept, the surest first", name, x_percent=True, y_percent=is_classification)
    return plot.drawing(f"{name} against the share of examples kept", axes, *lines)
