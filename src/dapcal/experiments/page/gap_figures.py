"""Figures of the UCI gap experiment on the results page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from matplotlib.figure import Figure

from dapcal.experiments.gap.summary import base_of
from dapcal.experiments.page.drawings import BLACK, Drawing
from dapcal.experiments.page.files import GapResults
from dapcal.experiments.plots import BLUE, GREY, ORANGE, new_figure
from dapcal.experiments.published import UCI_GAP

ROWS = {"MAP": GREY, "VI": BLACK, "VI + paper": ORANGE, "VI + ours": BLUE}


def likelihood(summary: dict[str, Any]) -> Iterable[Drawing]:
    """The paper's figure: test log-likelihood of every data set."""
    names = [name for name in UCI_GAP if name in summary]

    def draw() -> Figure:
        figure, panels = new_figure(len(names), width=2.1, height=2.7)
        for place, (axes, name) in enumerate(zip(panels, names, strict=True)):
            for height, (row, colour) in enumerate(reversed(ROWS.items())):
                found = summary[name][row]["log_likelihood"]
                axes.errorbar(found["mean"], height, xerr=found["error"], fmt="o", color=colour, capsize=3)
                if row in UCI_GAP[name]:
                    mean, error = UCI_GAP[name][row]
                    axes.errorbar(
                        mean, height + 0.28, xerr=error, fmt="s", color=colour, mfc="white", ms=4, lw=0.8, capsize=2
                    )
            axes.set_yticks(range(len(ROWS)), list(reversed(ROWS)) if place == 0 else [""] * len(ROWS))
            axes.set(title=name, ylim=(-0.5, len(ROWS) - 0.3))
            axes.locator_params(axis="x", nbins=4)
            if min(summary[name][row]["log_likelihood"]["mean"] for row in ROWS) < -100:
                axes.set_xscale("symlog", linthresh=10)
                axes.set_xticks([-1000, -100, -10, 0], ["−1000", "−100", "−10", "0"])
            axes.tick_params(axis="x", labelsize=7)
        figure.supxlabel("test log-likelihood, nats", fontsize=9)
        return figure

    if names:
        yield Drawing(
            "uci-gap-likelihood",
            "Test log-likelihood in the gap, mean and one standard error over splits: ours (filled) and the paper's "
            "own numbers (hollow, just above). Axes differ, and that of naval is logarithmic beyond −10.",
            draw,
        )


def gains(results: GapResults) -> Iterable[Drawing]:
    """Differences to the posterior alone, one dot for each split."""
    rows = {"VI + paper": ORANGE, "VI + ours": BLUE, "ensemble + ours": BLUE, "Laplace + ours": BLUE}

    def draw() -> Figure:
        figure, panels = new_figure(len(rows), width=2.6, height=2.7)
        for axes, (row, colour) in zip(panels, rows.items(), strict=True):
            for height, name in enumerate(reversed(results.tables)):
                after, before = (results.values(name, which, "log_likelihood") for which in (row, base_of(row)))
                gains = [a - b for a, b in zip(after, before, strict=True)]
                shift = [height + 0.3 * ((i * 0.618) % 1 - 0.5) for i in range(len(gains))]  # so that dots stay apart
                axes.plot(gains, shift, "o", color=colour, ms=3.5, alpha=0.6, mew=0)
            axes.axvline(0, color=GREY, lw=0.8)
            axes.set_xscale("symlog", linthresh=0.1)
            axes.set_xlim(-300, 1000)
            axes.set_xticks([-100, -1, 0, 1, 100], ["−100", "−1", "0", "1", "100"])
            axes.set_yticks(range(len(results.tables)), list(reversed(results.tables)) if axes is panels[0] else [])
            axes.set_title(row)
        figure.supxlabel("log-likelihood less that of the posterior alone, nats", fontsize=9)
        return figure

    if all(row in record["rows"] for row in rows for record in results.splits):
        yield Drawing(
            "uci-gap-gains",
            "Change of the test log-likelihood by each adjustment, one dot for each split, logarithmic beyond ±0.1. "
            "Dots right of the line are better than the posterior alone.",
            draw,
        )
