"""How well does it tell the classes of new data apart? ROC and precision–recall curves, where the target is known."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dapcal import metrics
from dapcal.models.judged_rows import JudgedClasses
from dapcal.report.examples import Examples
from dapcal.report.kit.markup import Captioned, cut, figures, legend, paragraph, table
from dapcal.report.kit.numbers import percent
from dapcal.report.kit.svg import HEIGHT, Plot, Scale

_MOST_CLASSES = 8
_FEWEST = (
    10  # rows of one among several classes: curves of fewer are steps of chance, and would count as much in the mean
)
_UNIT = Scale(0, 1)
_WIDE = 60  # units that a square drawing is higher

Points = tuple[tuple[float, float], ...]


class Curves(NamedTuple):
    """One class against the rest, or the mean over several: (x, y) along both curves, from left to right."""

    name: str
    share: float  # of the rows that are of the class: the precision of guessing
    auroc: float
    average_precision: float
    roc: Points  # share of the rest that is taken for the class, share of the class that is found
    precision: Points  # share of the class that is found, and of what is taken for it the share that is


class Decision(NamedTuple):
    """What predicting the likelier of two classes comes to."""

    false_alarms: float
    recall: float
    precision: float | None  # None where the class is never predicted


class Apart(NamedTuple):
    """Of two classes the second one; of several those that most rows have."""

    classes: tuple[Curves, ...]  # the most frequent first
    left_out: int  # classes that are rarer, or have no rows
    decision: Decision | None  # of two classes
    rows: int

    @property
    def mean(self) -> Curves:
        """Over the classes (macro average): at every share of false alarms, and at every recall."""
        grid = np.linspace(0, 1, len(self.classes[0].roc))
        found = [np.interp(grid, *np.array(curves.roc).T) for curves in self.classes]
        precision = np.mean([[y for _, y in curves.precision] for curves in self.classes], 0)
        shares, areas, averages = (
            float(np.mean([getattr(curves, name) for curves in self.classes]))
            for name in ("share", "auroc", "average_precision")
        )
        roc = ((0.0, 0.0), *_points(grid, np.mean(found, 0)))
        return Curves("mean over classes", shares, areas, averages, roc, _points(grid, precision))


def measure(examples: Examples) -> Apart | None:
    """On the sample of new rows; None without targets, and where all of them are of one class."""
    judged = examples.subject.judged
    if judged is None or not isinstance(judged.sample, JudgedClasses):
        return None
    true, probabilities = judged.sample
    names = examples.subject.classes
    counts = torch.bincount(true, minlength=len(names)).tolist()
    order, fewest = [1], 1
    if len(names) > 2:
        order, fewest = sorted(range(len(names)), key=lambda place: -counts[place])[:_MOST_CLASSES], _FEWEST
    order = [place for place in order if fewest <= counts[place] < len(true)]
    if not order:
        return None
    curves = tuple(_curves(names[place], true == place, probabilities[:, place]) for place in order)
    decision = _decision(true, probabilities) if len(names) == 2 else None
    return Apart(curves, len(names) - len(order), decision, len(true))


def section(examples: Examples, found: Apart | None) -> str:
    """Both curves, and of several classes a table."""
    judged = examples.subject.judged
    if found is None or judged is None:
        return ""
    several = found.decision is None
    shown = found.mean if several else found.classes[0]
    worst = min(found.classes, key=lambda curves: curves.auroc)
    rows = f"{found.rows:,} rows of {cut(examples.subject.new_name)}"
    if found.rows < judged.rows:
        rows = f"{found.rows:,} of {judged.rows:,} rows of {cut(examples.subject.new_name)}, drawn at random"
    content = paragraph(f"{_lead(found)} Measured on {rows}.")
    if several:
        entries = [("after", shown.name), ("out", f"told apart worst: {cut(worst.name, 40)}")]
        content += legend([*entries, *([("train", "each of the others")] if len(found.classes) > 2 else [])])
    charts = [
        Captioned(_roc_chart(found, shown, worst), "ROC curve", _roc_words(shown)),
        Captioned(_precision_chart(found, shown, worst), "Precision and recall", _precision_words(shown)),
    ]
    return content + figures(charts) + (_table(found) if several else "")


def _lead(found: Apart) -> str:
    """What is drawn."""
    if found.decision is None:
        return (
            "Each class against the rest: rows are ranked by its probability, and more and more of them taken for it."
        )
    name = cut(found.classes[0].name, 40)
    return (
        f"Rows are ranked by the probability of “{name}”. Whoever acts on fewer or more of them than are predicted as "
        "such (the dot) moves along these lines."
    )


def _curves(name: str, is_class: Tensor, probability: Tensor) -> Curves:
    inside, outside = probability[~is_class], probability[is_class]
    areas = metrics.detection(inside, outside)
    roc, precision = metrics.roc_curve(inside, outside), metrics.precision_recall_curve(inside, outside)
    share = float(is_class.double().mean())
    return Curves(name, share, areas.auroc, areas.aucpr, _points(*roc), _points(*precision))


def _points(x: Tensor | np.ndarray, y: Tensor | np.ndarray) -> Points:
    return tuple(zip(x.tolist(), y.tolist(), strict=True))


def _decision(true: Tensor, probabilities: Tensor) -> Decision:
    is_class, predicted = true == 1, probabilities.argmax(1) == 1
    right = int((is_class & predicted).sum())
    taken = int(predicted.sum())
    false_alarms = (taken - right) / int((~is_class).sum())
    return Decision(false_alarms, right / int(is_class.sum()), right / taken if taken else None)


def _roc_words(shown: Curves) -> str:
    return (
        f"Area under it (AUROC): {percent(shown.auroc)}, how often a row of the class has a higher probability of it "
        "than a row of the rest. The dashed line is guessing, 50 %."
    )


def _precision_words(shown: Curves) -> str:
    return (
        f"Average precision: {percent(shown.average_precision)}. The dashed line is guessing, {percent(shown.share)}."
    )


def _roc_chart(found: Apart, shown: Curves, worst: Curves) -> str:
    plot = Plot(_UNIT, _UNIT, height=HEIGHT + _WIDE)
    lines = _lines(plot, found, shown, worst, "roc")
    parts = [plot.line([(0, 0), (1, 1)], "ideal", "guessing"), *lines]
    if found.decision is not None:
        words = f"{percent(found.decision.recall)} found, {percent(found.decision.false_alarms)} of the rest with them"
        parts.append(plot.dot(found.decision.false_alarms, found.decision.recall, "after", words, 5))
    axes = plot.axes("share of the rest taken for the class", "share of the class found", True, True)
    return plot.drawing(f"ROC curve: AUROC {percent(shown.auroc)}", axes, *parts)


def _precision_chart(found: Apart, shown: Curves, worst: Curves) -> str:
    plot = Plot(_UNIT, _UNIT, height=HEIGHT + _WIDE)
    lines = _lines(plot, found, shown, worst, "precision")
    parts = [plot.line([(0, shown.share), (1, shown.share)], "ideal", "guessing"), *lines]
    if found.decision is not None and found.decision.precision is not None:
        words = f"{percent(found.decision.recall)} found, {percent(found.decision.precision)} of what is taken is right"
        parts.append(plot.dot(found.decision.recall, found.decision.precision, "after", words, 5))
    axes = plot.axes("share of the class found (recall)", "share of these that is right (precision)", True, True)
    return plot.drawing(f"Precision and recall: average precision {percent(shown.average_precision)}", axes, *parts)


def _lines(plot: Plot, found: Apart, shown: Curves, worst: Curves, which: str) -> list[str]:
    """Classes in grey, the one that is told apart worst over them, and what is shown on top."""
    others = [curves for curves in found.classes if curves is not worst]
    drawn = [*((curves, "train") for curves in others), (worst, "out")] if found.decision is None else []
    return [plot.line(getattr(each, which), class_, each.name) for each, class_ in (*drawn, (shown, "after"))]


def _table(found: Apart) -> str:
    """The classes one by one."""
    rows = [
        (cut(each.name, 40), percent(each.share), percent(each.auroc), percent(each.average_precision))
        for each in (found.mean, *found.classes)
    ]
    caption = "One class against the rest, the most frequent first"
    if found.left_out:
        caption += f"; {found.left_out} with fewer rows are not shown"
    return table(caption, ("", "share of the rows", "AUROC", "average precision"), rows)
