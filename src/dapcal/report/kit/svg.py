"""Inline SVG: scales, axes, lines, bars and dots, coloured by CSS classes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dapcal.report.kit.markup import tag, text
from dapcal.report.kit.numbers import number

WIDTH, HEIGHT = 380, 270  # units of the drawing; the page scales it
_CHARACTER = 6.2  # about the width of one in an axis label


@dataclass(frozen=True)
class Scale:
    """Values to shares of an axis: even, or even in asinh(value/unit), like a logarithm that takes any sign."""

    low: float
    high: float
    unit: float | None = None

    def __call__(self, value: float) -> float:
        """0 at `low`, 1 at `high`."""
        low, high = self._bent(self.low), self._bent(self.high)
        return (self._bent(value) - low) / ((high - low) or 1.0)

    def back(self, share: float) -> float:
        """The value at a share."""
        low, high = self._bent(self.low), self._bent(self.high)
        bent = low + share * (high - low)
        return bent if self.unit is None else self.unit * math.sinh(bent)

    def ticks(self, most: int) -> list[float]:
        """Round values, at most about `most`."""
        if self.unit is None:
            return _even_ticks(self.low, self.high, most)
        rounds = [factor * 10.0**power for power in range(-12, 13) for factor in (1, 3)]
        sizes = [size for size in rounds if size >= self.unit / 3]
        values = sorted({0.0, *sizes, *(-size for size in sizes)})
        return [value for value in values if self.low <= value <= self.high]

    def _bent(self, value: float) -> float:
        return value if self.unit is None else math.asinh(value / self.unit)


@dataclass(frozen=True)
class Plot:
    """A rectangle with two axes; its methods give markup in its coordinates."""

    x: Scale
    y: Scale
    height: float = HEIGHT
    left: float = 64
    right: float = 22
    top: float = 18
    bottom: float = 42

    def across(self, value: float) -> float:
        """Horizontal place of a value, held inside the drawing."""
        return self.left + min(max(self.x(value), 0.0), 1.0) * (WIDTH - self.left - self.right)

    def up(self, value: float) -> float:
        """Vertical place of a value, no further than one height outside the drawing."""
        return self.height - self.bottom - min(max(self.y(value), -1.0), 2.0) * (self.height - self.top - self.bottom)

    def axes(self, x_name: str, y_name: str, x_percent: bool = False, y_percent: bool = False) -> str:
        """Both axes."""
        return self.y_axis(y_name, y_percent) + self.x_axis(x_name, x_percent)

    def x_axis(self, name: str, percent: bool = False) -> str:
        """Floor, ticks and name."""
        floor, last = self.height - self.bottom, -math.inf
        parts = [tag("line", x1=self.left, x2=WIDTH - self.right, y1=floor, y2=floor, class_="axis")]
        ticks = self.x.ticks(6)
        for value, label in zip(ticks, _labels(ticks, percent), strict=True):
            place = self.across(value)
            half = _CHARACTER * len(label) / 2
            if place - half > last:  # labels that would touch are left out
                parts.append(tag("line", x1=place, x2=place, y1=floor, y2=floor + 4, class_="axis"))
                parts.append(tag("text", text(label), x=place, y=floor + 16, class_="tick middle"))
                last = place + half + 4
        middle = (self.left + WIDTH - self.right) / 2
        parts.append(tag("text", text(name), x=middle, y=self.height - 6, class_="name middle"))
        return "".join(parts)

    def y_axis(self, name: str, percent: bool = False) -> str:
        """Grid, ticks and name."""
        floor, parts = self.height - self.bottom, []
        ticks = self.y.ticks(max(2, round((floor - self.top) / 45)))
        for value, label in zip(ticks, _labels(ticks, percent), strict=True):
            place = self.up(value)
            parts.append(tag("line", x1=self.left, x2=WIDTH - self.right, y1=place, y2=place, class_="grid"))
            parts.append(tag("text", text(label), x=self.left - 6, y=place + 4, class_="tick end"))
        middle = (self.top + floor) / 2
        turned = f"rotate(-90 11 {middle:.1f})"
        parts.append(tag("text", text(name), x=11, y=middle, transform=turned, class_="name middle"))
        return "".join(parts)

    def line(self, points: Iterable[tuple[float, float]], class_: str, title: str = "") -> str:
        """Points joined by straight lines."""
        places = " ".join(f"{self.across(x):.1f},{self.up(y):.1f}" for x, y in points)
        return tag("polyline", _title(title), points=places, class_=f"line {class_}")

    def area(self, lower: Sequence[tuple[float, float]], upper: Sequence[tuple[float, float]], class_: str) -> str:
        """What lies between two lines."""
        places = " ".join(f"{self.across(x):.1f},{self.up(y):.1f}" for x, y in (*lower, *reversed(upper)))
        return tag("polygon", points=places, class_=class_)

    def bar(self, start: float, end: float, height: float, class_: str, title: str = "") -> str:
        """A bar from the floor."""
        left, right = self.across(start), self.across(end)
        base, top = self.up(max(self.y.low, 0.0)), self.up(height)
        size = {"width": max(right - left - 1, 0.5), "height": max(base - top, 0.0)}
        return tag("rect", _title(title), x=left, y=top, class_=f"bar {class_}", **size)

    def dot(self, x: float, y: float, class_: str, title: str = "", radius: float = 4) -> str:
        """A dot that says what it is."""
        return tag("circle", _title(title), cx=self.across(x), cy=self.up(y), r=radius, class_=f"dot {class_}")

    def vertical(self, x: float, label: str, class_: str = "mark") -> str:
        """A line over the whole height, with a label above the drawing, where nothing crosses it."""
        place, half = self.across(x), _CHARACTER * len(label) / 2
        middle = min(max(place, self.left + half), WIDTH - self.right - half)
        line = tag("line", x1=place, x2=place, y1=self.top, y2=self.height - self.bottom, class_=class_)
        return line + tag("text", text(label), x=middle, y=self.top - 6, class_=f"label {class_} middle")

    def horizontal(self, y: float, label: str, class_: str, others: Sequence[Sequence[tuple[float, float]]]) -> str:
        """A line over the whole width; its label stands above or under one end, where the fewest others cross it."""
        place, width = self.up(y), 1.1 * _CHARACTER * len(label)
        drawn = [(self.across(a), self.up(b)) for points in others for a, b in _close_together(points)]
        ends = {"end": (WIDTH - self.right - width, WIDTH - self.right), "start": (self.left, self.left + width)}

        def crossings(spot: tuple[str, float]) -> int:
            (left, right), base = ends[spot[0]], spot[1]
            return sum(left <= a <= right and base - 11 <= b <= base + 3 for a, b in drawn)

        anchor, base = min(((end, place + shift) for shift in (-5, 13) for end in ends), key=crossings)
        x = ends[anchor][anchor == "end"] + (2 if anchor == "start" else -2)
        line = tag("line", x1=self.left, x2=WIDTH - self.right, y1=place, y2=place, class_=class_)
        return line + tag("text", text(label), x=x, y=base, class_=f"label {class_} {anchor}")

    def clipped(self, *parts: str) -> str:
        """What of the parts lies between the axes."""
        width, height = WIDTH - self.left - self.right, self.height - self.top - self.bottom
        box = f"{self.left:g} {self.top:g} {width:g} {height:g}"
        return tag("svg", "".join(parts), x=self.left, y=self.top, width=width, height=height, viewBox=box)

    def drawing(self, label: str, *parts: str) -> str:
        """The whole; `label` is what a screen reader says."""
        box = f"0 0 {WIDTH} {self.height:g}"
        return tag("svg", "".join(parts), viewBox=box, role="img", aria_label=label, class_="chart")


def covering(values: Iterable[float], margin: float = 0.05, floor: float | None = None) -> Scale:
    """An even scale over finite values, with a margin; `floor` fixes its lower end."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    room = margin * ((high - low) or abs(high) or 1.0)
    return Scale(low - room if floor is None else floor, high + room)


def _close_together(points: Sequence[tuple[float, float]], steps: int = 50) -> Iterable[tuple[float, float]]:
    """Places along a line through points."""
    for (a, b), (c, d) in pairwise(points):
        yield from ((a + (c - a) * step / steps, b + (d - b) * step / steps) for step in range(steps + 1))


def _even_ticks(low: float, high: float, most: int) -> list[float]:
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [count * step for count in range(first, last + 1)]


def _labels(ticks: list[float], percent: bool) -> list[str]:
    """As many digits as it takes to write the ticks, three at least."""
    shown = [100 * tick for tick in ticks] if percent else ticks
    step = min((right - left for left, right in pairwise(shown)), default=1.0)
    digits = 3
    while digits < 12 and any(abs(float(f"{value:.{digits - 1}e}") - value) > 0.01 * step for value in shown):
        digits += 1
    return [f"{number(value, digits)} %" if percent else number(value, digits) for value in shown]


def _title(words: str) -> str:
    return tag("title", text(words)) if words else ""
