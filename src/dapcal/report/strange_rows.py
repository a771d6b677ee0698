"""The strangest examples side by side with their nearest training examples: rows of a table, or pictures."""

from __future__ import annotations

import base64

from dapcal.explain import Column
from dapcal.models.subject import Picture, Row
from dapcal.report import words
from dapcal.report.findings import Findings
from dapcal.report.markup import cells, paragraph, scrolling, tag, text
from dapcal.report.numbers import number
from dapcal.report.strangest import Strange

_MOST_COLUMNS = 12
_LARGEST_PICTURE = 40_000  # bytes


def strangest(findings: Findings) -> str:
    """All of them, after a word on what is shown."""
    lead = "Examples with the highest scores (framed), beside the training examples nearest to them."
    if findings.subject.calibrated.example.ndim == 2:
        lead = (
            "Examples with the highest scores, beside the training examples nearest to them. A column is marked where "
            "it differs from those by more than training examples differ from their own neighbours, or lies outside "
            "the range of training values."
        )
    if not findings.subject.is_classification:
        lead += " After ± stands half the width of the 95 % interval."
    return paragraph(f"{lead} Their numbers count from 1.") + "".join(
        _article(findings, each) for each in findings.strangest
    )


def _article(findings: Findings, found: Strange) -> str:
    is_picture = isinstance(found.shown, Picture)
    heading = f"{'Image' if is_picture else 'Row'} {found.row + 1:,} of {findings.strangest_of}"
    told = "".join(paragraph(sentence) for sentence in words.strange(findings, found))
    return tag(
        "article", tag("h3", text(heading)) + told + (_pictures if is_picture else _side_by_side)(findings, found)
    )


def _pictures(findings: Findings, found: Strange) -> str:
    parts = [_picture(found.shown, "this one", "this")]
    for near in found.nearest:
        told = f"{words.target(findings.subject, near.target)}, distance {number(near.distance)}"
        parts.append(_picture(near.shown, told, "near"))
    return tag("div", "".join(parts), class_="pictures")


def _picture(shown: Row | Picture, caption: str, class_: str) -> str:
    data = shown.png if isinstance(shown, Picture) else b""
    if not data or len(data) > _LARGEST_PICTURE:
        image = paragraph(f"picture of {len(data) // 1000} kB left out", "small")
    else:
        image = f'<img alt="{text(caption)}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
    return tag("figure", image + tag("figcaption", text(caption)), class_=class_)


def _side_by_side(findings: Findings, found: Strange) -> str:
    """One line per column, the most different first."""
    subject, explanation = findings.subject, found.explanation
    rows = [row if isinstance(row, dict) else {} for row in (found.shown, *(near.shown for near in found.nearest))]
    columns = {column.name: column for column in explanation.columns if column.name in rows[0]}
    names = [*columns, *(name for name in rows[0] if name not in columns)]
    answers = [
        words.answer(subject, explanation.after),
        *(words.target(subject, near.target) for near in found.nearest),
    ]
    distances = ["", *(number(near.distance) for near in found.nearest)]
    body = _line(f"{words.cut(subject.target)} (predicted, then true)", answers)
    body += _line(f"distance between {found.space}", distances)
    for name in names[:_MOST_COLUMNS]:
        body += _line(words.cut(name), [words.cut(row.get(name, ""), 40) for row in rows], columns.get(name))
    hidden = len(names) - _MOST_COLUMNS
    caption = "Columns, the most different first" + (f"; {hidden} more are not shown" if hidden > 0 else "")
    heads = ["column", "this one", *(f"nearest {place}" for place in range(1, len(rows)))]
    return scrolling(caption, heads, body, "strange")


def _line(name: str, values: list[str], column: Column | None = None) -> str:
    badge, class_ = "", "near"
    if column is not None and (column.is_far or column.is_outside):
        badge, class_ = tag("span", "out of range" if column.is_outside else "far", class_="badge"), "far"
    return tag("tr", tag("th", text(name) + badge, scope="row") + cells(values), class_=class_)
