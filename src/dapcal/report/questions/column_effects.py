"""What does it look at? What shuffling a column costs, and how predictions follow the columns that matter most."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dapcal.models.subject import Axis
from dapcal.report.examples import Examples
from dapcal.report.kit.markup import Captioned, cut, figures, paragraph, table
from dapcal.report.kit.numbers import number
from dapcal.report.kit.svg import Plot, covering

_MOST_ROWS = 300
_SHUFFLES = 2
_SHOWN = 10
_CURVES = 3
_STEPS = 15
_LARGEST = 200  # columns that are shuffled


class Importance(NamedTuple):
    """What the error grows by when the held-out values of a column are shuffled (Breiman 2001)."""

    column: str
    loss: float  # share of rows that turn wrong, or growth of the root mean square error as people see it


class Effect(NamedTuple):
    """Partial dependence (Friedman 2001): predictions with one column set to a value, over held-out rows."""

    column: str
    values: tuple[float, ...]  # in the column's unit
    mean: tuple[float, ...]
    low: tuple[float, ...]  # a quarter of the rows lie under this
    high: tuple[float, ...]  # and a quarter over this


class ColumnEffects(NamedTuple):
    """Of all columns, and of the numbers among the first."""

    important: tuple[Importance, ...]  # largest first
    effects: tuple[Effect, ...]
    rows: int


def measure(examples: Examples) -> ColumnEffects | None:
    """On held-out examples; None where inputs are not columns with names."""
    subject = examples.subject
    names = tuple(dict.fromkeys(subject.features))
    if not 1 < len(names) <= _LARGEST or subject.has_labels:
        return None
    x, y = examples.x[:_MOST_ROWS], examples.y[:_MOST_ROWS]
    places = {name: [i for i, other in enumerate(subject.features) if other == name] for name in names}
    base = _error(examples, x, y)
    generator = torch.Generator().manual_seed(0)
    losses = dict.fromkeys(names, 0.0)
    for name in names:
        for _ in range(_SHUFFLES):
            changed = x.clone()
            order = torch.randperm(len(x), generator=generator).to(x.device)
            changed[:, places[name]] = x[order][:, places[name]]
            losses[name] += (_error(examples, changed, y) - base) / _SHUFFLES
    important = tuple(Importance(*item) for item in sorted(losses.items(), key=lambda item: -item[1]))
    numbers = {axis.name: axis for axis in subject.numbers}
    drawn = [numbers[one.column] for one in important if one.column in numbers and one.loss > 0][:_CURVES]
    return ColumnEffects(important, tuple(_effect(examples, x, axis, places[axis.name]) for axis in drawn), len(x))


def section(examples: Examples, found: ColumnEffects | None) -> str:
    """A table of columns, and a curve of each of the first numbers."""
    if found is None:
        return ""
    subject = examples.subject
    kind = "share of examples that turn wrong" if subject.is_classification else "growth of the error"
    lead = (
        f"On {found.rows:,} held-out examples the values of one column at a time were shuffled. What that costs says "
        "how much predictions hang on the column; of columns that tell the same, each alone may seem to matter little."
    )
    rows = [(cut(one.column), _cost(one.loss, subject.is_classification)) for one in found.important[:_SHOWN]]
    hidden = len(found.important) - len(rows)
    caption = "Columns, the most important first" + (f"; {hidden} more are not shown" if hidden > 0 else "")
    curves = [
        Captioned(
            _chart(effect, _what(examples)),
            cut(effect.column, 40),
            "Mean prediction over held-out examples with this column set to a value; half of them lie in the band.",
        )
        for effect in found.effects
    ]
    return paragraph(lead) + table(caption, ("column", kind), rows) + (figures(curves) if curves else "")


def _error(examples: Examples, x: Tensor, y: Tensor) -> float:
    mean = _means(examples, x)
    if examples.subject.is_classification:
        return float((mean.argmax(-1) != y).double().mean())
    return examples.subject.unit.rmse(mean, y)


def _means(examples: Examples, x: Tensor) -> Tensor:
    return torch.cat([prediction.mean.double() for prediction in examples.subject.calibrated.batches(x, 1024)])


def _effect(examples: Examples, x: Tensor, axis: Axis, places: list[int]) -> Effect:
    subject = examples.subject
    place = axis.place if axis.place is not None else places[0]
    grid = subject.train.x[:, place].double().cpu().quantile(torch.linspace(0.02, 0.98, _STEPS).double()).unique()
    found = []
    for value in grid.tolist():
        changed = x.clone()
        changed[:, places] = 0.0  # a mark of missing values, too
        changed[:, place] = value
        if axis.magnitude is not None:
            changed[:, places[-1]] = float(axis.magnitude(np.array(axis.center + axis.scale * value)))
        mean = _means(examples, changed)
        told = (
            mean[:, _class(examples)] if subject.is_classification else torch.from_numpy(subject.unit.means(mean[:, 0]))
        )
        found.append((float(told.mean()), float(told.quantile(0.25)), float(told.quantile(0.75))))
    mean_of, low, high = zip(*found, strict=True)
    return Effect(axis.name, tuple((axis.center + axis.scale * grid).tolist()), mean_of, low, high)


def _class(examples: Examples) -> int:
    """The last of two classes, else the most frequent one."""
    count = len(examples.subject.classes)
    return 1 if count == 2 else int(torch.bincount(examples.subject.train.y.cpu(), minlength=count).argmax())


def _what(examples: Examples) -> str:
    subject = examples.subject
    return (
        f"probability of {cut(subject.classes[_class(examples)], 24)}" if subject.classes else cut(subject.target, 40)
    )


def _cost(loss: float, is_classification: bool) -> str:
    return f"{100 * loss:.1f} %".replace("-", "−") if is_classification else number(loss)


def _chart(effect: Effect, what: str) -> str:
    plot = Plot(covering(effect.values, margin=0.0), covering([*effect.low, *effect.high]))
    low, high, mean = (list(zip(effect.values, line, strict=True)) for line in (effect.low, effect.high, effect.mean))
    drawn = plot.area(low, high, "band") + plot.line(mean, "after")
    return plot.drawing(f"{what} against {effect.column}", plot.axes(cut(effect.column, 40), what), drawn)
