"""Figures of the performance page: ratios with their range, and time over sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from dapcal.experiments.page.drawings import Drawing
from dapcal.experiments.performance import Line, Row
from dapcal.experiments.plots import BLUE, GREY, ORANGE, RED, new_figure

_COLOURS = (BLUE, ORANGE, GREY, RED)


def ratios(rows: Mapping[str, Sequence[Row]], titles: Mapping[str, tuple[str, str]]) -> Drawing:
    """Every row with a peer, ours over theirs, turned so that left is better for rates, too."""
    shown = [(titles[name][0], row) for name, own in rows.items() for row in own if row.ratio is not None]

    def draw() -> Figure:
        figure = Figure(figsize=(11, 1.2 + 0.24 * len(shown)))
        axes = figure.add_subplot()
        for place, (_, row) in enumerate(shown):
            found, limit = row.ratio, row.limit
            if found is None:
                continue
            turned = limit is not None and limit.least
            least, median, most = (
                (1 / found.most, 1 / found.median, 1 / found.least)
                if turned
                else (found.least, found.median, found.most)
            )
            colour = RED if row.met is False else BLUE
            axes.plot([least, most], [place, place], color=colour, lw=1.2)
            axes.plot(median, place, "o", color=colour, ms=4)
            if limit is not None and limit.of == "ratio":
                axes.plot(1 / limit.value if turned else limit.value, place, "|", color=GREY, ms=9, mew=1.5)
        axes.axvline(1, color=GREY, lw=0.8)
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        between = (1, 2, 5) if high < 1e3 * low else (1,)
        steps = [step * 10.0**power for power in range(-4, 5) for step in between]
        axes.set_xticks([step for step in steps if low <= step <= high], minor=False)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_yticks(range(len(shown)), [f"{row.name} | {row.peer}" for _, row in shown], fontsize=6)
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_xlabel("ours / theirs (left = better)")
        axes.grid(axis="y", color=GREY, alpha=0.15)
        return figure

    return Drawing(
        "performance-ratios",
        "Ours beside each peer: medians, and the range over all runs. Rates are turned, so that left is better "
        "everywhere; grey marks are limits, red rows miss theirs.",
        draw,
    )


def scaling(lines: Sequence[Line]) -> Drawing:
    """A panel for each size, both axes logarithmic."""
    overs = list(dict.fromkeys(line.over for line in lines))
    names = list(dict.fromkeys(line.name for line in lines))
    colours = dict(zip(names, _COLOURS * len(names), strict=False))

    def draw() -> Figure:
        figure, panels = new_figure(max(1, len(overs)), width=3.8)
        for axes, over in zip(panels, overs, strict=False):
            for line in lines:
                if line.over == over:
                    low, high = ([pick(runs) for runs in line.seconds] for pick in (min, max))
                    axes.plot(line.sizes, line.medians, "o-", color=colours[line.name], ms=3, label=line.name)
                    axes.fill_between(line.sizes, low, high, color=colours[line.name], alpha=0.2, lw=0)
            axes.set(xscale="log", yscale="log", xlabel=over, ylabel="seconds")
            axes.legend(fontsize=7)
        return figure

    return Drawing(
        "performance-scaling",
        "Seconds of a search over training points, queries and numbers of a point, all else fixed. Lines are medians, "
        "bands the range over all runs.",
        draw,
    )
