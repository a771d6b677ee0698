"""How good is it? Errors and proper scores on held-out data, before and after."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from dapcal import label_metrics, metrics
from dapcal.label_metrics import LabelMetrics
from dapcal.likelihoods import NormalLikelihood
from dapcal.report.examples import Examples
from dapcal.report.kit.markup import cut, paragraph, table
from dapcal.report.kit.numbers import number, percent
from dapcal.report.predictions import Answers
from dapcal.report.questions.how_sure import Line, Sureness, error_of

_MOST_LABELS = 30


class ClassAccuracy(NamedTuple):
    """Of class probabilities."""

    accuracy: float
    nll: float
    brier: float

    def error(self) -> Line:
        """How often it is right."""
        return "share right (accuracy)", percent(self.accuracy), "high"

    def scores(self) -> list[Line]:
        """What errors and wrong doubts cost together."""
        return [_nll_line(self.nll), ("Brier score", number(self.brier), "low")]

    def told(self, count: int) -> str:
        """The sentence that `how_sure` ends."""
        error = error_of(self.accuracy, count)
        return f"it is right {percent(self.accuracy)} of the time (give or take {percent(2 * error)})"


class LabelAccuracy(NamedTuple):
    """Of labels' probabilities: over all labels, and over inputs."""

    accuracy: float
    exact: float  # share of inputs with all labels right
    nll: float
    each: LabelMetrics

    def error(self) -> Line:
        """How often a label is right."""
        return "share of labels right", percent(self.accuracy), "high"

    def scores(self) -> list[Line]:
        """What errors and wrong doubts cost together; the likelihood is of all labels of an example."""
        exact = "examples with all labels right", percent(self.exact), "high"
        return [exact, _nll_line(self.nll), ("Brier score of a label", number(self.each.macro["brier"]), "low")]

    def told(self, count: int) -> str:
        """The sentence that `how_sure` ends."""
        error = error_of(self.accuracy, count)
        right = f"{percent(self.accuracy)} of its labels are right (give or take {percent(2 * error)})"
        return f"{right}, all of them on {percent(self.exact)}"


class NumberAccuracy(NamedTuple):
    """Of predicted numbers, all as people see the target."""

    rmse: float
    nll: float
    crps: float | None  # of Gaussian predictions

    def error(self) -> Line:
        """How far off it is."""
        return "error (root mean square)", number(self.rmse), "low"

    def scores(self) -> list[Line]:
        """What errors and wrong doubts cost together."""
        crps = [] if self.crps is None else [("CRPS", number(self.crps), "low")]
        return [*crps, _nll_line(self.nll)]

    def told(self, count: int) -> str:  # noqa: ARG002
        """The sentence that `how_sure` ends."""
        return f"its error is {number(self.rmse)} (root mean square)"


class Accuracy(NamedTuple):
    """Before and after."""

    before: ClassAccuracy | LabelAccuracy | NumberAccuracy
    after: ClassAccuracy | LabelAccuracy | NumberAccuracy


def measure(examples: Examples) -> Accuracy:
    """Against the targets of the held-out examples."""
    of: Callable[[Examples, Answers], ClassAccuracy | LabelAccuracy | NumberAccuracy]
    of = _of_labels if examples.subject.has_labels else _of_classes if examples.subject.classes else _of_numbers
    return Accuracy(of(examples, examples.held_out.before), of(examples, examples.held_out.after))


def section(examples: Examples, found: Accuracy, sure: Sureness) -> str:
    """The table, and what distance costs near the data; `sure` gives lines of it."""
    lead = "“Before” is the model as it was, “after” the same model with distance taken into account."
    before = [found.before.error(), *sure.before.lines(), *found.before.scores()]
    after = [found.after.error(), *sure.after.lines(), *found.after.scores()]
    rows = [(name, old, new, good) for (name, old, _), (_, new, good) in zip(before, after, strict=True)]
    return (
        paragraph(f"{lead} {judged_on(examples)}")
        + table("Quality on held-out examples", ("", "before", "after", "should be"), rows)
        + (_label_by_label(examples, found.after.each) if isinstance(found.after, LabelAccuracy) else "")
        + paragraph(price(examples, found), "small")
    )


def judged_on(examples: Examples) -> str:
    """Which held-out data the numbers come from."""
    if examples.is_independent:
        return (
            f"Measured on {examples.count:,} held-out examples that had no say in choosing φ (the other half of the "
            "held-out data chose it)."
        )
    return (
        f"Measured on {examples.count:,} held-out examples. Half of the held-out data chose φ, and which half is not "
        "known here, so what stands under “after” may flatter a little."
    )


def price(examples: Examples, found: Accuracy) -> str:
    """What taking distance into account costs on data like the training data."""
    change = found.after.nll - found.before.nll
    if change == 0:
        return "Taking distance into account leaves the negative log-likelihood here as it was."
    words = f"Taking distance into account {'raises' if change > 0 else 'lowers'} the negative log-likelihood here by"
    curve = examples.subject.calibrated.curve
    allowed = curve.guard - curve.base_nll
    guard = (
        f"; the calibration allowed a rise of {number(allowed, 2)} on its own half" if math.isfinite(allowed) else ""
    )
    return f"{words} {number(abs(change), 2)} nats{guard}."


def _label_by_label(examples: Examples, found: LabelMetrics) -> str:
    """The labels after calibration, those that cost most likelihood first."""
    shares = examples.y.double().mean(0).tolist()
    parts = zip(found.nll, examples.subject.classes, shares, found.accuracy, found.calibration_error, strict=True)
    order = sorted(parts, reverse=True)
    rows = [
        (cut(name), percent(there), percent(right), number(ece, 2), number(nll))
        for nll, name, there, right, ece in order[:_MOST_LABELS]
    ]
    hidden = len(order) - len(rows)
    caption = "Label by label, after" + (f"; {hidden} more cost less and are not shown" if hidden > 0 else "")
    return table(caption, ("", "examples that have it", "right", "calibration error", "NLL"), rows)


def _of_classes(examples: Examples, answers: Answers) -> ClassAccuracy:
    return ClassAccuracy(
        accuracy=metrics.accuracy(answers.mean, examples.y),
        nll=float(-answers.log_prob.mean()),
        brier=metrics.brier(answers.mean, examples.y),
    )


def _of_labels(examples: Examples, answers: Answers) -> LabelAccuracy:
    probs = answers.mean.clamp(0, 1)  # the paper's weights may make more of them
    return LabelAccuracy(
        accuracy=1 - label_metrics.hamming_loss(probs, examples.y),
        exact=label_metrics.subset_accuracy(probs, examples.y),
        nll=float(-answers.log_prob.mean()),
        each=label_metrics.per_label(probs, examples.y),
    )


def _of_numbers(examples: Examples, answers: Answers) -> NumberAccuracy:
    y, unit = examples.y, examples.subject.unit
    is_normal = isinstance(examples.subject.likelihood, NormalLikelihood) and unit.smearing is None
    size = abs(unit.scale)
    return NumberAccuracy(
        rmse=unit.rmse(answers.mean, y),
        nll=float(-answers.log_prob.mean()) + float(unit.log_slopes(y).mean()),  # a density in the target's unit
        crps=size * metrics.crps_gaussian(answers.mean, answers.variance, y) if is_normal else None,
    )


def _nll_line(nll: float) -> Line:
    return "negative log-likelihood (nats)", number(nll), "low"
