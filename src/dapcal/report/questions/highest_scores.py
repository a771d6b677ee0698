"""Which examples look least like the training data? Those of the highest scores, beside what is nearest to them."""

from __future__ import annotations

import base64
from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.explain import Answer, Column, Explanation, explainer
from dapcal.models.subject import Picture, Row, Subject
from dapcal.report.examples import Examples
from dapcal.report.kit.markup import cells, cut, paragraph, scrolling, tag, text
from dapcal.report.kit.numbers import number, percent

COUNT, NEIGHBOURS = 6, 3
_MOST_COLUMNS = 12
_LARGEST_PICTURE = 40_000  # bytes


class Near(NamedTuple):
    """A training input beside one of a high score."""

    shown: Row | Picture
    target: tuple[float, ...]  # the class, or the targets as the network sees them
    distance: float


class Scored(NamedTuple):
    """One input of a high score."""

    rank: int  # by score, from 1
    row: int  # its place in its data, from 0
    shown: Row | Picture
    target: tuple[float, ...]  # empty where it is not known
    explanation: Explanation
    cells: tuple[str, ...]  # of a table: what is missing or unusual by itself, a sentence each
    space: str  # that the neighbours are nearest in
    nearest: tuple[Near, ...]


def measure(examples: Examples) -> tuple[Scored, ...]:
    """Of new data, where there are some, else of held-out data."""
    if examples.is_made_up:
        return _highest(examples.subject, examples.x, examples.rows, examples.held_out.score, examples.y)
    new = examples.others[0]
    return _highest(examples.subject, new.x, new.rows, examples.other_predictions[0].score, None)


def heading(examples: Examples) -> str:
    """Of the section."""
    return f"Strangest examples: {cut(_data(examples))}"


def section(examples: Examples, found: tuple[Scored, ...]) -> str:
    """All of them, after a word on what is shown."""
    subject = examples.subject
    lead = "Examples with the highest scores (framed), beside the training examples nearest to them."
    if subject.calibrated.example.ndim == 2:
        lead = (
            "Examples with the highest scores, beside the training examples nearest to them. A column is marked where "
            "it differs from those by more than training examples differ from their own neighbours, or lies outside "
            "the range of training values."
        )
    if not subject.is_classification:
        lead += " After ± stands half the width of the 95 % interval."
    return paragraph(f"{lead} Their numbers count from 1.") + "".join(_article(examples, each) for each in found)


def told(examples: Examples, found: Scored) -> list[str]:
    """What there is to say of one."""
    subject, explanation = examples.subject, found.explanation
    before, after = prediction_words(subject, explanation.before), prediction_words(subject, explanation.after)
    truth = f" True: {target_words(subject, found.target)}." if found.target else ""
    reason = f" Flagged as {explanation.reason}." if explanation.reason else ""
    return [
        f"Predicted {after}; without distance {before}.{truth}",
        f"{_rarity(examples, found)}{reason}{_reach(explanation)}",
        *([" ".join(found.cells)] if found.cells else []),
    ]


def _reach(explanation: Explanation) -> str:
    reach = explanation.farthest
    radius = "" if reach.radius is None else f"; up to {number(reach.radius)} (the radius) is ordinary"
    return f" Distance {number(reach.raw)} between {reach.space}{radius}."


def prediction_words(subject: Subject, found: Answer) -> str:
    """A prediction in a few words."""
    if subject.has_labels:
        named = sorted(zip(found.mean, subject.classes, strict=True), reverse=True)
        likely = [f"{cut(name)} ({percent(p)})" for p, name in named if p > 0.5]
        return ", ".join(likely) or f"none of the labels ({cut(named[0][1])}: {percent(named[0][0])})"
    if subject.classes:
        best = max(range(len(found.mean)), key=lambda place: found.mean[place])
        return f"{cut(subject.classes[best])} ({percent(found.mean[best])})"
    unit = subject.unit
    shown = list(zip(unit.means(found.mean), unit.amounts(found.lower), unit.amounts(found.upper), strict=True))
    if unit.smearing is not None:  # not as far to both sides
        return ", ".join(f"{number(mean)} ({number(lower, 2)} to {number(upper, 2)})" for mean, lower, upper in shown)
    return ", ".join(f"{number(mean)} ± {number((upper - lower) / 2, 2)}" for mean, lower, upper in shown)


def target_words(subject: Subject, value: tuple[float, ...]) -> str:
    """A true target as people see it."""
    if subject.has_labels:
        return ", ".join(cut(name) for name, there in zip(subject.classes, value, strict=True) if there) or "none"
    if subject.classes:
        return cut(subject.classes[int(value[0])])
    return ", ".join(map(number, subject.unit.amounts(value)))


def _highest(subject: Subject, x: Tensor, rows: Tensor, score: Tensor, y: Tensor | None) -> tuple[Scored, ...]:
    """Of inputs (N, ...) at places (N,) in their data, with scores (N,), and targets where known."""
    order = score.argsort(descending=True, stable=True)[:COUNT]
    train = subject.train
    explained = explainer(subject.calibrated, train.x, subject.features, min(NEIGHBOURS, len(train.x)))
    found = []
    for rank, place in enumerate(order.tolist(), 1):
        explanation = explained(x[place : place + 1])
        # columns are compared with what is near in the table, pictures with what decided
        nearest = explanation.nearest if x.ndim == 2 else explanation.farthest.nearest
        shown = subject.show(torch.cat([x[place : place + 1], train.x[list(nearest.rows)].to(x.device)]))
        targets = [_plain(train.y[row]) for row in nearest.rows]
        near = zip(shown[1:], targets, nearest.distances, strict=True)
        found.append(
            Scored(
                rank=rank,
                row=int(rows[place]),
                shown=shown[0],
                target=() if y is None else _plain(y[place]),
                explanation=explanation,
                cells=_cells(subject, x[place : place + 1]),
                space=nearest.space,
                nearest=tuple(Near(*each) for each in near),
            )
        )
    return tuple(found)


def _cells(subject: Subject, x: Tensor) -> tuple[str, ...]:
    """What is missing in one input (1, P), and what is unusual by itself."""
    told = []
    if subject.missing is not None and (missing := subject.missing(x)[0]):
        told.append(f"Missing: {', '.join(map(cut, missing))}.")
    if subject.unusual is not None and (unusual := subject.unusual(x)[0]):
        told.append(f"Unusual by itself: {', '.join(f'{cut(name)} ({what})' for name, what in unusual.items())}.")
    return tuple(told)


def _plain(target: Tensor) -> tuple[float, ...]:
    return tuple(target.double().flatten().tolist())


def _data(examples: Examples) -> str:
    return "held-out data" if examples.is_made_up else examples.subject.new_name


def _rarity(examples: Examples, found: Scored) -> str:
    """How unusual its score is; p-values are read from held-out scores, so that held-out examples have a rank."""
    if examples.is_made_up:
        return f"Number {found.rank} by score of {examples.count:,} held-out examples."
    p, compared = found.explanation.p_value, len(examples.subject.calibrated.evidence.held_out)
    if p < 1.5 / (compared + 1):
        return f"p = {number(p, 2)}: it scores higher than all {compared:,} held-out examples it was compared with."
    return f"p = {number(p, 2)}: about {percent(p)} of held-out examples score as high."


def _article(examples: Examples, found: Scored) -> str:
    is_picture = isinstance(found.shown, Picture)
    title = f"{'Image' if is_picture else 'Row'} {found.row + 1:,} of {_data(examples)}"
    words = "".join(paragraph(sentence) for sentence in told(examples, found))
    beside = (_pictures if is_picture else _side_by_side)(examples.subject, found)
    return tag("article", tag("h3", text(title)) + words + beside)


def _pictures(subject: Subject, found: Scored) -> str:
    parts = [_picture(found.shown, "this one", "this")]
    for near in found.nearest:
        words = f"{target_words(subject, near.target)}, distance {number(near.distance)}"
        parts.append(_picture(near.shown, words, "near"))
    return tag("div", "".join(parts), class_="pictures")


def _picture(shown: Row | Picture, caption: str, class_: str) -> str:
    data = shown.png if isinstance(shown, Picture) else b""
    if not data or len(data) > _LARGEST_PICTURE:
        image = paragraph(f"picture of {len(data) // 1000} kB left out", "small")
    else:
        image = f'<img alt="{text(caption)}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
    return tag("figure", image + tag("figcaption", text(caption)), class_=class_)


def _side_by_side(subject: Subject, found: Scored) -> str:
    """One line per column, the most different first."""
    explanation = found.explanation
    rows = [row if isinstance(row, dict) else {} for row in (found.shown, *(near.shown for near in found.nearest))]
    columns = {column.name: column for column in explanation.columns if column.name in rows[0]}
    names = [*columns, *(name for name in rows[0] if name not in columns)]
    truths = [target_words(subject, near.target) for near in found.nearest]
    distances = ["", *(number(near.distance) for near in found.nearest)]
    body = _line(
        f"{cut(subject.target)} (predicted, then true)", [prediction_words(subject, explanation.after), *truths]
    )
    body += _line(f"distance between {found.space}", distances)
    for name in names[:_MOST_COLUMNS]:
        body += _line(cut(name), [cut(row.get(name, ""), 40) for row in rows], columns.get(name))
    hidden = len(names) - _MOST_COLUMNS
    caption = "Columns, the most different first" + (f"; {hidden} more are not shown" if hidden > 0 else "")
    heads = ["column", "this one", *(f"nearest {place}" for place in range(1, len(rows)))]
    return scrolling(caption, heads, body, "highest")


def _line(name: str, values: list[str], column: Column | None = None) -> str:
    badge, class_ = "", "near"
    if column is not None and (column.is_far or column.is_outside):
        badge, class_ = tag("span", "out of range" if column.is_outside else "far", class_="badge"), "far"
    return tag("tr", tag("th", text(name) + badge, scope="row") + cells(values), class_=class_)
