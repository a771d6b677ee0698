"""The dot plot of the no-harm benchmark: every difference of every case, better to the right."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from dapcal.experiments.no_harm.summary import LIMITS, Difference
from dapcal.experiments.page.drawings import Drawing
from dapcal.experiments.plots import BLUE, GREY, ORANGE, RED

PANELS = {  # title: columns, and where the axis turns logarithmic
    "accuracy or RMSE, points": (("accuracy", "rmse"), 1.0),
    "NLL, nats": (("nll",), 0.01),
    "ECE or coverage, points": (("ece", "coverage"), 1.0),
    "AUROC, points": (("auroc",), 1.0),
    "FPR95, points": (("fpr95",), 1.0),
}


def dots(every: Sequence[Difference]) -> Drawing:
    """One row for each case, one dot for each difference (several where it has several kinds of outliers)."""
    cases = list(dict.fromkeys(one.case for one in every))

    def draw() -> Figure:
        figure = Figure(figsize=(13, 1.2 + 0.19 * len(cases)))
        panels = figure.subplots(1, len(PANELS), sharey=True, squeeze=False)[0]
        for axes, (title, (columns, turn)) in zip(panels, PANELS.items(), strict=True):
            for one in every:
                if one.column in columns:
                    error = 0.0 if math.isnan(one.harm.error) else one.harm.error
                    limit = LIMITS.get(one.column, math.inf)
                    colour = BLUE if one.harm.mean <= 0 else ORANGE if one.harm.mean <= limit else RED
                    axes.errorbar(
                        -one.harm.mean, len(cases) - cases.index(one.case), xerr=error, fmt="o", color=colour,
                        ms=3, lw=0.8, alpha=0.8,
                    )  # fmt: skip
            axes.axvline(0, color=GREY, lw=0.8)
            for limit in {LIMITS[column] for column in columns if column in LIMITS}:
                axes.axvline(-limit, color=RED, lw=0.8, ls=":")
            low, high = axes.get_xlim()
            axes.set_xscale("symlog", linthresh=turn)
            axes.set_xlim(min(low, -2 * turn), max(high, 2 * turn))
            axes.tick_params(axis="x", labelsize=6)
            axes.grid(axis="y", color=GREY, alpha=0.15)
            axes.set_title(title, fontsize=9)
        panels[0].set_yticks(range(len(cases), 0, -1), cases, fontsize=7)
        panels[0].set_ylim(0.3, len(cases) + 0.7)
        figure.supxlabel("gain (right = better), logarithmic beyond the first tick", fontsize=9)
        return figure

    return Drawing(
        "no-harm-differences",
        "All differences, before less after, so that dots right of the line are gains; bars are one standard error. "
        "Blue: no worse; orange: worse, within what is tolerated (dotted line) where there is such; red: worse beyond "
        "it.",
        draw,
    )
