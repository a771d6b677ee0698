"""What it knows, and where: confidence or epistemic deviation over two inputs, for several values of φ."""

from __future__ import annotations

import base64
from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.calibrate import Calibrated
from dapcal.models.subject import Axis, Subject
from dapcal.report.examples import Examples, sample
from dapcal.report.kit.colors import palette, palette_png
from dapcal.report.kit.markup import cut, tag, text
from dapcal.report.kit.numbers import number, percent
from dapcal.report.kit.svg import WIDTH, Plot, Scale
from dapcal.types import Adjusted

_CELLS = 96  # along each side
_STEPS = 15
_DECADES = 2.0  # of the factor g(φ) on both sides of the chosen one
_MARGIN = 0.75  # of the training inputs' range, on every side
_MOST_POINTS = 300
_BATCH = 1024


class MapFrame(NamedTuple):
    """The plane at one φ; None is the posterior as it was."""

    phi: float | None
    times: float  # the chosen factor
    values: Tensor  # (cells, cells), the first row at the largest second input


class Map(NamedTuple):
    """The plane at several φ, in what people see of the inputs."""

    axes: tuple[Axis, Axis]
    low: tuple[float, float]  # of the two inputs
    high: tuple[float, float]
    frames: tuple[MapFrame, ...]  # first the posterior as it was, then by φ
    chosen: int  # which of them is the calibrated one
    points: Tensor  # (M, 2) training inputs, drawn at random
    is_second: Tensor  # (M,) which of them are of the second of two classes
    range: tuple[float, float]  # of the values that colours stand for


def measure(examples: Examples) -> Map | None:
    """The map, where inputs are two numbers."""
    subject, train = examples.subject, examples.subject.train.x
    places = _places(subject)
    if places is None:
        return None
    calibrated = subject.calibrated
    width, train = train.shape[1], train[:, places]
    margin = _MARGIN * (train.amax(0) - train.amin(0))
    low, high = train.amin(0) - margin, train.amax(0) + margin
    across, down = (
        torch.linspace(float(a), float(b), _CELLS, dtype=train.dtype) for a, b in zip(low, high, strict=True)
    )
    grid = train.new_zeros(_CELLS**2, width)
    grid[:, places] = torch.stack([across.repeat(_CELLS), down.flip(0).repeat_interleave(_CELLS)], 1).to(train.device)
    scale = 1.0 if subject.is_classification else abs(subject.unit.scale)
    times = torch.logspace(-_DECADES, _DECADES, _STEPS, dtype=torch.float64)
    phis = calibrated.scale.inverse(times * calibrated.factor)
    phis[_STEPS // 2] = calibrated.phi
    times, phis = times[phis.isfinite()], phis[phis.isfinite()]  # g may stay under an upper end
    values = scale * _values(calibrated, grid, torch.cat([torch.zeros(1), times]) * calibrated.factor)
    frames = zip([None, *phis.tolist()], [0.0, *times.tolist()], values.reshape(-1, _CELLS, _CELLS), strict=True)
    rows = sample(torch.arange(len(train)), _MOST_POINTS)
    points = train[rows.to(train.device)].double().cpu()
    names = subject.features or ("first input", "second input")
    axes = subject.axes or (Axis(names[0]), Axis(names[1]))
    return Map(
        axes=axes,
        low=_shown(axes, low),
        high=_shown(axes, high),
        frames=tuple(MapFrame(*frame) for frame in frames),
        chosen=1 + _STEPS // 2,
        points=torch.stack([axis.center + axis.scale * points[:, i] for i, axis in enumerate(axes)], 1),
        is_second=(subject.train.y[rows].reshape(len(rows), -1)[:, 0] == 1).cpu() & _has_two(subject),
        range=_range(values, 2 if subject.has_labels else len(subject.classes)),
    )


def _places(subject: Subject) -> list[int] | None:
    """The two input columns that decide, where there are two."""
    train = subject.train.x
    if train.ndim != 2 or not train.is_floating_point():
        return None
    if subject.axes is not None and all(axis.place is not None for axis in subject.axes):
        return [axis.place for axis in subject.axes if axis.place is not None]
    return [0, 1] if train.shape[1] == 2 else None


def section(examples: Examples, found: Map | None) -> str:
    """The map under its slider; empty where there is none."""
    if found is None:
        return ""
    is_classification = examples.subject.is_classification
    name = "confidence" if is_classification else "deviation from missing data"
    if examples.subject.unit.smearing is not None:
        name += ", as a share of the prediction"
    told = [_frame_words(frame, place == found.chosen) for place, frame in enumerate(found.frames)]
    slider = (
        '<label for="phi-range">How much distance counts (φ)</label>'
        f'<input id="phi-range" type="range" min="0" max="{len(told) - 1}" step="1" value="{found.chosen}">'
        f'<output id="phi-output" for="phi-range">{text(told[found.chosen])}</output>'
    )
    hidden = tag("ul", "".join(tag("li", text(each)) for each in told), id="phi-words", hidden="")
    colors = _color_bar(found, name, is_classification)
    content = chart(found, name) + colors + tag("div", slider, class_="slider") + hidden
    return tag("figure", content + tag("figcaption", text(caption(examples.subject, found))), class_="alone")


def _frame_words(found: MapFrame, is_chosen: bool) -> str:
    """What a frame of the map shows."""
    if found.phi is None:
        return "Without distance: the model as it was"
    if is_chosen:
        return f"φ = {number(found.phi)}, the calibrated one"
    return f"φ = {number(found.phi)}: distance counts {number(found.times, 2)} × as much as calibrated"


def caption(subject: Subject, found: Map) -> str:
    """What the map shows."""
    name = "Confidence" if subject.classes else "Standard deviation that comes from missing data"
    classes = [cut(name, 24) for name in subject.classes]
    by = f", white for {classes[0]} and black for {classes[1]}" if _has_two(subject) else ""
    return (
        f"{name} over the two inputs, and {len(found.points):,} training examples{by}. Move the slider, or use the "
        "arrow keys, to see other values of φ; the leftmost is the model as it was."
    )


def chart(data: Map, value_name: str) -> str:
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


def _color_bar(data: Map, value_name: str, as_percent: bool) -> str:
    """What colours stand for."""
    colors, width = palette(32), 200
    parts = [
        tag("rect", x=place * width / 32, y=0, width=width / 32 + 0.5, height=12, fill=f"rgb{color}")
        for place, color in enumerate(colors)
    ]
    low, high = ((percent if as_percent else number)(value) for value in data.range)
    high = high if as_percent else f"{high} or more"
    parts.append(tag("text", text(low), x=0, y=28, class_="tick start"))
    parts.append(tag("text", text(high), x=width, y=28, class_="tick end"))
    parts.append(tag("text", text(value_name), x=width / 2, y=28, class_="name middle"))
    label = f"Colours: {value_name} from {low} to {high}"
    return tag("svg", "".join(parts), viewBox=f"-2 0 {width + 4} 34", role="img", aria_label=label, class_="colours")


def _values(calibrated: Calibrated, grid: Tensor, factors: Tensor) -> Tensor:
    """Confidence, or epistemic deviation, at every factor and place, (M, N)."""
    parts = []
    for batch in grid.split(_BATCH):
        adjusted, d0 = calibrated.adjust(calibrated.posterior, batch), calibrated.distance(batch)
        parts.append(torch.stack([_value(calibrated, adjusted, factor * d0) for factor in factors.tolist()]))
    return torch.cat(parts, 1).double().cpu()


def _value(calibrated: Calibrated, adjusted: Adjusted, distance: Tensor) -> Tensor:
    likelihood, ensemble = calibrated.posterior.likelihood, adjusted(distance)
    if likelihood.task != "regression":
        return likelihood.confidence(likelihood.mean(ensemble))
    epistemic = likelihood.split(ensemble, adjusted(torch.zeros_like(distance))).epistemic
    return epistemic.mean(-1).sqrt()


def _has_two(subject: Subject) -> bool:
    """Whether there are two classes, which points can be told apart by."""
    return len(subject.classes) == 2 and not subject.has_labels


def _shown(axes: tuple[Axis, Axis], place: Tensor) -> tuple[float, float]:
    first, second = (axis.center + axis.scale * float(value) for axis, value in zip(axes, place, strict=True))
    return first, second


def _range(values: Tensor, classes: int) -> tuple[float, float]:
    """From 1/K to 1; in regression to what 98 % of the calibrated plane do not exceed, so that its shape is seen."""
    if classes:
        return 1 / classes, 1.0
    return 0.0, float(values[1 + _STEPS // 2].quantile(0.98))
