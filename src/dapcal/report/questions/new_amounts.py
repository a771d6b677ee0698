"""How near are predictions to the true values of the new data? Each against the other, where the target is known."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.amounts import amount
from dapcal.models.judged_rows import JudgedNumbers
from dapcal.records import LEVEL
from dapcal.report.examples import Examples, sample
from dapcal.report.kit.markup import cut, legend, paragraph, tag, text
from dapcal.report.kit.numbers import Size, percent, size_of
from dapcal.report.kit.svg import HEIGHT, Plot, Scale, covering

_MOST_DOTS = 600
_SQUARE = 60  # units that a square drawing is higher
_BINS = 15
_LEAST_IN_BIN = 20
_NEARLY_ALL = 0.005  # of the values lie beyond, at either end
_DECADE = 10.0
_LARGEST = 1e100  # whose differences and squares are numbers


class Band(NamedTuple):
    """Where intervals typically end, by the prediction."""

    predicted: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]


class Against(NamedTuple):
    """Rows that are drawn, and what all rows of the sample say."""

    predicted: Tensor  # (N,) of those that are drawn
    true: Tensor
    is_flagged: Tensor
    band: Band | None  # None of few rows
    scale: Scale  # of both axes, in units of `size`
    size: Size
    beyond: int  # dots that stand at the edge
    flagged: int  # rows of the sample
    flagged_coverage: float | None  # of their intervals; None without any


def measure(examples: Examples) -> Against | None:
    """On the sample of new rows; None without targets."""
    judged = examples.subject.judged
    if judged is None or not isinstance(judged.sample, JudgedNumbers):
        return None
    rows = judged.sample
    is_drawable = (torch.stack([rows.true, rows.predicted]).abs() < _LARGEST).all(0)
    if not is_drawable.any():
        return None
    rows = JudgedNumbers(*(values[is_drawable] for values in rows))
    inside = ((rows.lower <= rows.true) & (rows.true <= rows.upper)).double()[rows.is_flagged]
    drawn = sample(torch.arange(len(rows.true)), _MOST_DOTS)
    both = torch.stack([rows.predicted, rows.true])
    low, high = _range(both)
    size = size_of(max(abs(low), abs(high)))
    return Against(
        predicted=rows.predicted[drawn],
        true=rows.true[drawn],
        is_flagged=rows.is_flagged[drawn],
        band=_band(rows),
        scale=_scale(low / size.divisor, high / size.divisor, examples.subject.unit.smearing is not None),
        size=size,
        beyond=int(((both[:, drawn] < low) | (both[:, drawn] > high)).any(0).sum()),
        flagged=len(inside),
        flagged_coverage=float(inside.mean()) if len(inside) else None,
    )


def section(examples: Examples, found: Against | None) -> str:
    """The plot, and what to see in it."""
    judged = examples.subject.judged
    if found is None or judged is None:
        return ""
    level = percent(LEVEL)
    lead = (
        "Each dot is a row: across what was predicted for it, up what was true. On the dashed line both are the same."
    )
    kept = f"{level} intervals hold {percent(judged.coverage or 0.0)} of the true values"
    if found.flagged_coverage is not None:
        noun = "row that is" if found.flagged == 1 else "rows that are"
        kept += f", and {percent(found.flagged_coverage)} of those of the {found.flagged:,} {noun} flagged"
    band = "" if found.band is None else " The grey band reaches from where they typically begin to where they end."
    entries = [("dots after", "row like the training rows"), ("dots out", "flagged row")]
    caption = tag("strong", text(f"Predicted and true {cut(examples.subject.target, 40)}. ")) + text(
        _drawn(found, judged.rows)
    )
    figure = tag("figure", _chart(examples, found) + tag("figcaption", caption), class_="alone")
    return paragraph(lead) + paragraph(f"{kept}.{band}") + legend(entries) + figure


def _drawn(found: Against, rows: int) -> str:
    """Which rows are drawn, and how."""
    count = len(found.true)
    words = f"All {count:,} rows." if count == rows else f"{count:,} of {rows:,} rows, drawn at random."
    if found.scale.unit is not None:
        words += " The axes shrink large values, as the model learns logarithms."
    if found.beyond:
        words += (
            f" {found.beyond:,} of them lie{'s' if found.beyond == 1 else ''} beyond the axes, and stand at their edge."
        )
    return words


def _range(values: Tensor) -> tuple[float, float]:
    """What is drawn: all values but those that lie further out than nearly all of them are apart."""
    ends = torch.tensor([_NEARLY_ALL, 1 - _NEARLY_ALL], dtype=values.dtype)
    low, high = values.flatten().quantile(ends).tolist()
    kept = values[(values >= 2 * low - high) & (values <= 2 * high - low)]
    return float(kept.min()), float(kept.max())


def _scale(low: float, high: float, learns_logarithms: bool) -> Scale:
    """Even; like a logarithm where that is learnt and values span more than a decade."""
    if learns_logarithms and 0 < _DECADE * low < high:
        return Scale(low / 1.1, high * 1.1, unit=low)
    return covering([low, high], floor=0.0 if 0 <= low < 0.05 * (high - low) else None)


def _band(rows: JudgedNumbers) -> Band | None:
    """Medians of the ends over bins of the prediction with equal counts."""
    bins = min(_BINS, len(rows.true) // _LEAST_IN_BIN)
    if bins < 2:
        return None
    order = rows.predicted.argsort()
    parts = [values[order].tensor_split(bins) for values in (rows.predicted, rows.lower, rows.upper)]
    return Band(*(tuple(float(each.quantile(0.5)) for each in part) for part in parts))


def _chart(examples: Examples, found: Against) -> str:
    plot = Plot(found.scale, found.scale, height=HEIGHT + _SQUARE)
    divisor = found.size.divisor
    parts = []
    if found.band is not None:
        lower, upper = (
            [(x / divisor, y / divisor) for x, y in zip(found.band.predicted, ends, strict=True) if math.isfinite(y)]
            for ends in (found.band.lower, found.band.upper)
        )
        parts.append(plot.clipped(plot.area(lower, upper, "band")))
    ends = [(end, end) for end in (found.scale.low, found.scale.high)]
    parts.append(plot.line(ends, "ideal", "predicted = true"))
    rows = zip(found.predicted.tolist(), found.true.tolist(), found.is_flagged.tolist(), strict=True)
    for predicted, true, flagged in sorted(rows, key=lambda row: row[2]):  # flagged ones on top
        words = f"{amount(predicted)} predicted, {amount(true)} true{', flagged' if flagged else ''}"
        place = min(max(true / divisor, found.scale.low), found.scale.high)
        parts.append(
            plot.dot(predicted / divisor, place, "out" if flagged else "after many", words, 4 if flagged else 3)
        )
    name = cut(examples.subject.target, 24)
    unit = f" ({found.size.word})" if found.size.word else ""
    axes = plot.axes(f"predicted {name}{unit}", f"true {name}{unit}")
    return plot.drawing(f"True against predicted {name}", axes, *parts)
