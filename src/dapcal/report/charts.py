"""The charts of a report, from its findings."""

from __future__ import annotations

import base64
import math

import torch

from dapcal.png import palette, palette_png
from dapcal.report.figures import HEIGHT, WIDTH, Plot, Scale, covering
from dapcal.report.histograms import Histogram
from dapcal.report.map import Map
from dapcal.report.markup import tag, text
from dapcal.report.numbers import number, percent
from dapcal.report.quality import BINS, LEVELS, ClassQuality, NumberQuality, Risk
from dapcal.search import Curve

SERIES = {"training": "train", "held-out": "held"}
"""CSS classes of a histogram's samples; what lies outside is "out" and "out2"."""
_HISTOGRAM_BINS = 36
_UNIT = Scale(0, 1)


def reliability(quality: ClassQuality, when: str) -> str:
    """How often the most likely class is right, by how sure the model is, over how many inputs each bin holds."""
    plot = Plot(_UNIT, _UNIT, bottom=96)
    counts = Plot(_UNIT, Scale(0, max(quality.bin_counts)), top=HEIGHT - 78)
    parts = [plot.line([(0, 0), (1, 1)], "ideal", "as often right as it says")]
    for place, count in enumerate(quality.bin_counts):
        if not count:
            continue
        said, right = quality.bin_confidence[place], quality.bin_accuracy[place]
        words = f"{count} examples: says {percent(said)}, is right {percent(right)}"
        error = 2 * math.sqrt(max(right * (1 - right), 0.25 / count) / count)
        parts += [
            counts.bar(place / BINS, (place + 1) / BINS, count, f"{when} soft", words),
            plot.line([(said, max(right - error, 0)), (said, min(right + error, 1))], f"{when} error"),
            plot.dot(said, right, when, words),
        ]
    label = f"Reliability {when} calibration: expected calibration error {number(quality.ece)}"
    axes = plot.y_axis("share right", percent=True) + counts.x_axis("how sure it is", percent=True)
    return plot.drawing(label, axes, counts.y_axis("examples"), *parts)


def coverage(before: NumberQuality, after: NumberQuality, count: int) -> str:
    """Share of targets inside their intervals, against what the intervals promise."""
    plot = Plot(_UNIT, _UNIT)
    errors = [2 * math.sqrt(level * (1 - level) / count) for level in LEVELS]
    lower = [(level, level - error) for level, error in zip(LEVELS, errors, strict=True)]
    upper = [(level, level + error) for level, error in zip(LEVELS, errors, strict=True)]
    parts = [plot.clipped(plot.area(lower, upper, "band")), plot.line([(0, 0), (1, 1)], "ideal", "as many as promised")]
    for quality, when in ((before, "before"), (after, "after")):
        points = list(zip(LEVELS, quality.observed, strict=True))
        parts.append(plot.line([(0, 0), *points, (1, 1)], when))
        parts += [
            plot.dot(level, seen, when, f"{when}: {percent(level)} promised, {percent(seen)} inside", 2.5)
            for level, seen in points
        ]
    axes = plot.axes("what intervals promise", "targets inside", x_percent=True, y_percent=True)
    return plot.drawing(f"Coverage of 95 % intervals after calibration: {percent(after.coverage)}", axes, *parts)


def pit(before: NumberQuality, after: NumberQuality, count: int) -> str:
    """Targets of `count` inputs by the decile of their predictive distribution: as many in each where it is right."""
    targets = sum(after.pit_counts)
    share, error = 1 / BINS, 2 * math.sqrt((1 / BINS) * (1 - 1 / BINS) / count)
    shares = [[found / targets for found in quality.pit_counts] for quality in (before, after)]
    plot = Plot(_UNIT, covering([share + error, *shares[0], *shares[1]], floor=0.0))
    parts = [
        plot.bar(place / BINS, (place + 1) / BINS, value, "after", f"after: {percent(value)} of the targets")
        for place, value in enumerate(shares[1])
    ]
    ends = [(0.0, share), (1.0, share)]
    band = plot.area([(x, y - error) for x, y in ends], [(x, y + error) for x, y in ends], "band")
    parts.append(plot.clipped(band))
    parts.append(plot.line(ends, "ideal", "as it should be"))
    parts.append(plot.line(_steps(shares[0], [place / BINS for place in range(BINS + 1)]), "before"))
    axes = plot.axes("place in the predicted distribution", "share of targets", x_percent=True, y_percent=True)
    return plot.drawing("Histogram of the places of targets in their predicted distributions", axes, *parts)


def selective(before: Risk, after: Risk, name: str, as_percent: bool) -> str:
    """The error among the inputs that are kept when the most doubtful ones are handed on."""
    # the first few inputs alone say nothing
    curves = [[(k, r) for k, r in zip(*risk, strict=True) if k >= 0.05] for risk in (before, after)]
    plot = Plot(_UNIT, covering([r for curve in curves for _, r in curve], floor=0.0))
    lines = [plot.line(curve, when) for curve, when in zip(curves, ("before", "after"), strict=True)]
    axes = plot.axes("share of examples kept, the surest first", name, x_percent=True, y_percent=as_percent)
    return plot.drawing(f"{name} against the share of examples kept", axes, *lines)


def losses(curve: Curve, phi: float) -> tuple[str, str]:
    """Calibration loss and held-out NLL over φ, where they change; what rises far above is cut off."""
    low, high = _where_it_changes(curve, phi)
    columns = (curve.phi, curve.loss, curve.nll, curve.nll + curve.error)
    tried = [row for row in zip(*(column.tolist() for column in columns), strict=True) if low <= row[0] <= high]
    loss = [(place, value) for place, value, _, _ in tried if math.isfinite(value)]
    nll = [(place, value) for place, _, value, above in tried if math.isfinite(above)]
    upper = [(place, above) for place, _, _, above in tried if math.isfinite(above)]
    chosen = f"chosen φ = {number(phi)}"

    def level(value: float) -> list[tuple[float, float]]:
        return [(low, value), (high, value)]

    least = min(curve.base_loss, *(value for _, value in loss))
    at_chosen = min(loss, key=lambda point: abs(point[0] - phi))[1]
    room = max(curve.base_loss - least, at_chosen - least, 0.005 * abs(curve.base_loss)) or 1.0
    plot = Plot(Scale(low, high), Scale(least - 0.1 * room, max(curve.base_loss, at_chosen) + 0.4 * room))
    upright = [(phi, plot.y.low), (phi, plot.y.high)]
    loss_chart = plot.drawing(
        f"Calibration loss over φ; {chosen}",
        plot.axes("φ", "calibration loss"),
        plot.clipped(plot.line(loss, "after")),
        plot.horizontal(curve.base_loss, "without distance", "reference", [loss, upright]),
        plot.vertical(phi, chosen),
    )

    has_guard = math.isfinite(curve.guard)
    least = min(curve.base_nll, *(value for _, value in nll))
    most = curve.base_nll + 2.5 * (curve.guard - curve.base_nll) if has_guard else max(value for _, value in nll)
    plot = Plot(Scale(low, high), covering([least, most]))
    upright = [(phi, plot.y.low), (phi, plot.y.high)]
    guard = level(curve.guard) if has_guard else []
    nll_chart = plot.drawing(
        f"Held-out negative log-likelihood over φ, and the guard on it; {chosen}",
        plot.axes("φ", "held-out NLL (nats)"),
        plot.clipped(plot.area(nll, upper, "band"), plot.line(nll, "after")),
        plot.horizontal(curve.base_nll, "without distance", "reference", [nll, upright, guard]),
        plot.horizontal(curve.guard, "guard", "limit", [nll, upright, level(curve.base_nll)]) if has_guard else "",
        plot.vertical(phi, chosen),
    )
    return loss_chart, nll_chart


def histogram(data: Histogram, x_name: str, line_name: str) -> str:
    """Shares of inputs over a quantity, one outline per sample, and the line that matters."""
    scale = _scale_of(data)
    edges = [scale.back(place / _HISTOGRAM_BINS) for place in range(_HISTOGRAM_BINS + 1)]
    shares = [_shares(values, edges) for _, values in data.samples]
    plot = Plot(scale, covering([value for share in shares for value in share], 0.15, floor=0.0))
    parts = []
    for (name, values), share in zip(data.samples, shares, strict=True):
        words = f"{name}: {len(values):,} examples, median {number(_quantile(values, 0.5))}"
        parts.append(plot.line(_steps(share, edges), series_of(data, name), words))
    if data.line is not None:
        parts.append(plot.vertical(data.line, line_name))
    axes = plot.axes(x_name if scale.unit is None else f"{x_name} (axis shrinks far values)", "share", y_percent=True)
    return plot.drawing(f"Histogram of {x_name}", axes, *parts)


def series_of(data: Histogram, name: str) -> str:
    """The CSS class of a sample."""
    others = [other for other, _ in data.samples if other not in SERIES]
    return SERIES[name] if name in SERIES else ("out", "out2")[min(others.index(name), 1)]


def plane(data: Map, value_name: str) -> str:
    """All frames of the map, of which one is shown, under the training inputs."""
    plot = Plot(Scale(data.low[0], data.high[0]), Scale(data.low[1], data.high[1]), height=350)
    frames = [
        tag(
            "image",
            href=f"data:image/png;base64,{base64.b64encode(palette_png(frame.values, *data.range)).decode()}",
            x=plot.left,
            y=plot.top,
            width=WIDTH - plot.left - plot.right,
            height=plot.height - plot.top - plot.bottom,
            preserveAspectRatio="none",
            class_="frame on" if place == data.chosen else "frame",
        )
        for place, frame in enumerate(data.frames)
    ]
    points = [
        tag("circle", cx=plot.across(x), cy=plot.up(y), r=2, class_="point other" if is_second else "point")
        for (x, y), is_second in zip(data.points.tolist(), data.is_second.tolist(), strict=True)
    ]
    axes = plot.axes(data.axes[0].name, data.axes[1].name)
    return plot.drawing(f"{value_name} over the two inputs", axes, *frames, *points)


def colour_bar(data: Map, value_name: str, as_percent: bool) -> str:
    """What colours stand for."""
    colours, width = palette(32), 200
    parts = [
        tag("rect", x=place * width / 32, y=0, width=width / 32 + 0.5, height=12, fill=f"rgb{colour}")
        for place, colour in enumerate(colours)
    ]
    low, high = ((percent if as_percent else number)(value) for value in data.range)
    high = high if as_percent else f"{high} or more"
    parts.append(tag("text", text(low), x=0, y=28, class_="tick start"))
    parts.append(tag("text", text(high), x=width, y=28, class_="tick end"))
    parts.append(tag("text", text(value_name), x=width / 2, y=28, class_="name middle"))
    label = f"Colours: {value_name} from {low} to {high}"
    return tag("svg", "".join(parts), viewBox=f"-2 0 {width + 4} 34", role="img", aria_label=label, class_="colours")


def _where_it_changes(curve: Curve, phi: float) -> tuple[float, float]:
    """The values of φ between which loss or NLL move, with the chosen one well inside."""
    moved = torch.zeros(len(curve.phi), dtype=torch.bool)
    for values, base in ((curve.loss, curve.base_loss), (curve.nll, curve.base_nll)):
        offset = (values - base).abs()
        finite = offset[offset.isfinite()]
        if len(finite) and float(finite.max()) > 0:
            moved |= offset > 0.01 * float(finite.median().clamp_min(0.01 * float(finite.max())))
    places = curve.phi[moved]
    low = min(float(places.min()) if len(places) else phi, phi - 3)
    high = min(max(float(places.max()) if len(places) else phi, phi + 3), phi + 8)
    return max(low, float(curve.phi.min())), min(high, float(curve.phi.max()))


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


def _steps(heights: list[float], edges: list[float]) -> list[tuple[float, float]]:
    """The outline of a histogram."""
    outline = [(edges[0], 0.0)]
    for left, right, height in zip(edges[:-1], edges[1:], heights, strict=True):
        outline += [(left, height), (right, height)]
    return [*outline, (edges[-1], 0.0)]


def _quantile(values: tuple[float, ...], share: float) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))
