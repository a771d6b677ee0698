"""Figures of image experiments on the results page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from dapcal.experiments.page.cells import decimal
from dapcal.experiments.page.drawings import BLACK, Drawing
from dapcal.experiments.page.files import ImageResults, Row
from dapcal.experiments.plots import BLUE, GREY, ORANGE, RED, new_figure
from dapcal.experiments.published import PHI

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:  # pragma: no cover
    raise ImportError("Figures need matplotlib; install it with: pip install 'dapcal[plots]'") from error

GREEN, PURPLE, OCHRE = "#009e73", "#8b5fbf", "#b58900"
LOOK: dict[str, tuple[str, str]] = {  # colour and line of every method, in all figures
    "MAP": (GREY, "-"),
    "ODIN": (OCHRE, ":"),
    "DDU": (GREEN, "--"),
    "DE": (PURPLE, "-."),
    "VI": (BLACK, "-"),
    "DAP, paper's": (ORANGE, "-"),
    "DAP, ours": (BLUE, "-"),
}
SETS = (BLACK, "#d55e00", "#56b4e9", "#009e73")  # OOD sets, in histograms


def detection(results: ImageResults) -> Iterable[Drawing]:
    """ROC and precision–recall curves of the main scores."""
    rows = [row for name in LOOK if (row := results.rows.get(name)) and row.curve("curves", row.score)]
    if not rows:
        return

    def draw() -> Figure:
        count = len(results.outside)
        figure = Figure(figsize=(3.2 * count, 5.6))
        panels = figure.subplots(2, count, squeeze=False)
        for column, name in enumerate(results.outside):
            upper, lower = panels[0, column], panels[1, column]
            for row in rows:
                found = row.curve("curves", row.score, name)
                for axes, curve in ((upper, "roc"), (lower, "precision_recall")):
                    x, y = found[curve]
                    _line(axes, x, y, row.name)
            upper.set(xlabel="false positive rate", title=f"{name}: ROC", xscale="log", xlim=(1e-3, 1), ylim=(0, 1.01))
            least = min(min(line.get_ydata()[5:]) for line in lower.lines)  # the first points are of a few images
            lower.set(xlabel="recall", title=f"{name}: precision and recall", ylim=(least - 0.02, 1.01))
            for axes, label in ((upper, "true positive rate"), (lower, "precision")):
                axes.set_ylabel(label if column == 0 else "")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncol=len(rows))
        return figure

    yield Drawing(
        f"{results.experiment}-detection",
        f"How well the main score of each method tells OOD images from {results.settings['inside']}'s test images "
        "(first seed). OOD images are the positive class, and false positive rates are logarithmic: the closer a curve "
        "to the upper left corner (ROC) or to the upper right one (precision and recall), the better.",
        draw,
    )


def scores(results: ImageResults) -> Iterable[Drawing]:
    """Histograms of the main scores inside and outside."""
    names = ("MAP", "DE", "VI", "DDU", "DAP, paper's", "DAP, ours")
    rows = [row for name in names if (row := results.rows.get(name)) and row.curve("curves", row.score, "test")]
    if not rows:
        return

    def draw() -> Figure:
        figure = Figure(figsize=(10.2, 2.9 * math.ceil(len(rows) / 3)))
        panels = figure.subplots(math.ceil(len(rows) / 3), 3, squeeze=False).flatten()
        for axes, row in zip(panels, rows, strict=False):
            found = row.curve("curves", row.score)
            bars = {results.settings["inside"]: found["test"]}
            bars |= {name: found[name]["bars"] for name in results.outside}
            for (name, counts), colour in zip(bars.items(), (GREY, *SETS), strict=False):
                _bars(axes, counts, found["limits"], colour, name, filled=name == results.settings["inside"])
            score = "score" if row.score == "score" else row.score
            axes.set(title=f"{row.name}: {score}", yscale="log", ylim=(5e-4, 1.3))
        for axes in panels[len(rows) :]:
            axes.set_axis_off()
        for axes in panels[: len(rows) : 3]:
            axes.set_ylabel("share of images")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncol=len(labels))
        return figure

    yield Drawing(
        f"{results.experiment}-scores",
        "Main scores of test images (grey) and of OOD images (first seed, logarithmic shares, the outermost 0.2 % "
        "gathered in the outermost bars). Where coloured lines lie on the grey, no threshold tells those images apart.",
        draw,
    )


def predictions(results: ImageResults) -> Iterable[Drawing]:
    """Reliability, and error among the images that are kept."""
    rows = [row for name in LOOK if (row := results.rows.get(name)) and row.curve("curves", "reliability")]
    if not rows:
        return

    def draw() -> Figure:
        figure, (left, right) = new_figure(2, width=4.6, height=3.6)
        left.plot([0, 1], [0, 1], color=GREY, lw=0.8, ls=":")
        for row in rows:
            confidence, accuracy, counts = row.curve("curves", "reliability")
            kept = [i for i, count in enumerate(counts) if count >= 20]
            _line(left, [confidence[i] for i in kept], [accuracy[i] for i in kept], row.name, marker="o", ms=3)
            coverage, risk = row.curve("curves", "selective")
            _line(right, [100 * c for c in coverage], [100 * r for r in risk], row.name)
        left.set(xlabel="confidence", ylabel="accuracy", title="reliability", xlim=(0, 1), ylim=(0, 1.02))
        right.set(xlabel="images kept, per cent", ylabel="error, per cent", title="selective risk")
        right.legend()
        return figure

    yield Drawing(
        f"{results.experiment}-predictions",
        f"Left: how often predictions of a confidence are right, in bins with at least 20 of "
        f"{results.settings['inside']}'s test images (first seed; the dotted line is perfect, above it is too little "
        f"confidence). Right: the error among the images that are kept when the least confident are handed on.",
        draw,
    )


def calibration(results: ImageResults) -> Iterable[Drawing]:
    """Distances of right and wrong images, and the calibration loss over φ, for both DAPs."""
    names = ("DAP, paper's", "DAP, ours")
    rows = [row for name in names if (row := results.rows.get(name)) and row.curve("facts", "curve")]
    if not rows:
        return

    def draw() -> Figure:
        figure = Figure(figsize=(9.4, 3.1 * len(rows)))
        panels = figure.subplots(len(rows), 2, squeeze=False)
        for (left, right), row in zip(panels, rows, strict=True):
            found = row.curve("curves", "distances")
            for kind, colour in (("right", GREY), ("wrong", RED)):
                counts = [sum(found[kind][i : i + 3]) for i in range(0, len(found[kind]), 3)]  # few are wrong
                _bars(left, counts, found["limits"], colour, f"classified {kind}", filled=kind == "right")
            left.set(xlabel="distance before φ", ylabel="share of images", title=f"{row.name}: test images")
            left.set_yscale("log")
            _loss(right, row, PHI.get(results.experiment) if row.name == names[0] else None)
        both = [axes.get_legend_handles_labels() for axes in panels[0]]
        handles, labels = both[0][0] + both[1][0], both[0][1] + both[1][1]
        figure.legend(handles, labels, loc="outside lower center", ncol=len(labels), fontsize=8)
        return figure

    yield Drawing(
        f"{results.experiment}-calibration",
        "Left: distances of test images from the training images, by whether the method classifies them right (first "
        "seed). Right: the calibration loss and the held-out NLL over φ; as φ grows the paper's loss tends to 0.1, "
        "that of ten probabilities that are all zero.",
        draw,
    )


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], name: str, **more: Any) -> None:
    colour, line = LOOK[name]
    axes.plot(x, y, color=colour, ls=line, lw=1.4, label=name, **more)


def _bars(axes: Axes, counts: Sequence[int], limits: Sequence[float], colour: str, name: str, filled: bool) -> None:
    """A histogram as shares, of counts in bins of equal width; nothing without spread."""
    if not counts:
        return
    low, high = limits
    edges = [low + (high - low) * i / len(counts) for i in range(len(counts) + 1)]
    shares = [count / sum(counts) for count in counts]
    axes.stairs(shares, edges, color=colour, fill=filled, alpha=0.35 if filled else 1.0, lw=1.2, label=name)


def _loss(axes: Axes, row: Row, published: float | None) -> None:
    """Loss over φ, and the held-out NLL on an axis of its own."""
    curve, phi = row.curve("facts", "curve"), row.curve("facts", "phi")
    words = f"{row.name}: φ = {decimal(phi, 2)}"
    axes.plot(curve["phi"], _numbers(curve["loss"]), color=BLACK, label="calibration loss")
    axes.plot([], [], color=ORANGE, ls="--", label="held-out NLL (right axis)")
    axes.axvline(phi, color=RED, lw=1, label="chosen φ")
    if published is not None:
        axes.axvline(published, color=RED, lw=1, ls=":", label="published φ")
        words += f" (published {decimal(published, 2)})"
    axes.set(xlabel="φ", ylabel="calibration loss", title=words, xlim=(-14, 6), ylim=(0, None))
    other = axes.twinx()
    other.spines["right"].set_visible(True)
    other.plot(curve["phi"], _numbers(curve["held_out_nll"]), color=ORANGE, ls="--")
    other.set_ylabel("held-out NLL, nats")
    top = max(value for value in curve["held_out_nll"] if value is not None)
    if top > 10:
        other.set(yscale="log", ylim=(0.5 * curve["uncalibrated_nll"], 1e4))
    else:
        other.set_ylim(0, 1.5 * top)


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]
