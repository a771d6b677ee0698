"""Samples of one quantity as outlines over it, with the line that matters."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dapcal.report.kit.markup import legend
from dapcal.report.kit.numbers import number
from dapcal.report.kit.svg import Plot, Scale, covering

_BINS = 36
_SERIES = {"training": "train", "held-out": "held"}
"""CSS classes of samples; what is neither of these is "out" and "out2"."""


class Histogram(NamedTuple):
    """Samples of one quantity, by where they come from, and a line that matters."""

    name: str
    samples: tuple[tuple[str, tuple[float, ...]], ...]  # training, held-out, then others
    line: float | None  # None where there is none


def drawn(data: Histogram, x_name: str, line_name: str) -> str:
    """Shares of inputs over a quantity, one outline per sample, and the line that matters."""
    scale = _scale_of(data)
    edges = [scale.back(place / _BINS) for place in range(_BINS + 1)]
    shares = [_shares(values, edges) for _, values in data.samples]
    plot = Plot(scale, covering([value for share in shares for value in share], 0.15, floor=0.0))
    parts = []
    for (name, values), share in zip(data.samples, shares, strict=True):
        words = f"{name}: {len(values):,} examples, median {number(_quantile(values, 0.5))}"
        parts.append(plot.line(outline(share, edges), series_of(data, name), words))
    if data.line is not None:
        parts.append(plot.vertical(data.line, line_name))
    axes = plot.axes(x_name if scale.unit is None else f"{x_name} (axis shrinks far values)", "share", y_percent=True)
    return plot.drawing(f"Histogram of {x_name}", axes, *parts)


def series_of(data: Histogram, name: str) -> str:
    """The CSS class of a sample."""
    others = [other for other, _ in data.samples if other not in _SERIES]
    return _SERIES[name] if name in _SERIES else ("out", "out2")[min(others.index(name), 1)]


def legend_of(*data: Histogram) -> str:
    """What the outlines of several histograms stand for, each once."""
    named = {name: series_of(each, name) for each in data for name, _ in each.samples}
    return legend((class_, name) for name, class_ in named.items())


def outline(heights: list[float], edges: list[float]) -> list[tuple[float, float]]:
    """The outline of bars side by side."""
    points = [(edges[0], 0.0)]
    for left, right, height in zip(edges[:-1], edges[1:], heights, strict=True):
        points += [(left, height), (right, height)]
    return [*points, (edges[-1], 0.0)]


def _scale_of(data: Histogram) -> Scale:
    """Even where all samples fit on one; else one that shrinks what lies far beyond the held-out inputs."""
    everything = [value for _, values in data.samples for value in values]
    inside = dict(data.samples)["held-out"]
    if data.line is not None:
        everything.append(data.line)
    low, high = min(everything), max(everything)
    middle, typical = _quantile(inside, 0.5), _quantile(inside, 0.95)
    if high - middle <= 8 * max(typical - middle, 1e-12):
        return covering(everything, 0.02, floor=0.0 if low >= 0 else None)
    return Scale(low, high + 0.05 * abs(high), unit=max(abs(middle), typical - middle, 1e-12))


def _shares(values: tuple[float, ...], edges: list[float]) -> list[float]:
    inner = torch.tensor(edges[1:-1], dtype=torch.float64)
    index = torch.bucketize(torch.tensor(values, dtype=torch.float64), inner)
    return (torch.bincount(index, minlength=len(edges) - 1) / len(values)).tolist()


def _quantile(values: tuple[float, ...], share: float) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))
