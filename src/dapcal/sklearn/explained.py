"""Explanations in the words of the table that estimators were fitted on: its target's unit, its columns and rows."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, fields
from html import escape
from typing import Any

from dapcal.amounts import amount
from dapcal.explain import Answer, Explanation
from dapcal.explain_words import aligned, clues, far, grid, likeliest, ranges, verdict
from dapcal.visible import brief, shown


@dataclass(frozen=True)
class Neighbour:
    """A training row near the explained one."""

    row: Hashable  # its label in the index of X, or its place where X had none
    distance: float  # between rows as networks take them: numbers in standard deviations
    target: Any  # its class, or its target in the unit of y
    values: Mapping[str, str]  # by column, as texts


@dataclass(frozen=True, repr=False)
class RowExplanation(Explanation):
    """An `Explanation` whose numbers are in the unit of y (variances in its square), and rows those of X.

    `print` shows it in words, a notebook as a table. Spaces and `nearest` name training rows by their places in
    `train_x_`, `neighbours` by their labels.
    """

    row: Hashable  # label in the index of X, or the place where X has none
    target: str  # what is predicted
    classes: tuple[str, ...]  # of `after.mean` in their order; empty in regression
    values: Mapping[str, str]  # of the row, by column
    neighbours: tuple[Neighbour, ...]  # nearest first
    alpha: float  # level at which the row is flagged

    def __repr__(self) -> str:
        return f"<explanation of row {shown(str(self.row))}: {self._answer(self.after)}; print() shows all of it>"

    def __str__(self) -> str:
        return shown("\n".join([*self._sentences(), "", *aligned(self._grid())]))

    def _repr_html_(self) -> str:
        head, *rows = [[escape(shown(cell)) for cell in line] for line in self._grid()]
        said = "".join(f"<li>{escape(shown(sentence))}</li>" for sentence in self._sentences())
        header = "".join(f"<th>{cell}</th>" for cell in head)
        body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
        return f"<ul>{said}</ul><table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"

    def _sentences(self) -> list[str]:
        return [
            f"Row {brief(str(self.row))}: `{brief(self.target)}` {self._answer(self.after)}",
            f"Before distances count: {self._answer(self.before)}",
            verdict(self, self.alpha),
            *clues(self),
            far(self, self.values),
        ]

    def _answer(self, answer: Answer) -> str:
        if self.classes:
            return likeliest(answer.mean, self.classes)
        return ranges(answer.mean, answer.lower, answer.upper)

    def _grid(self) -> list[list[str]]:
        near = self.neighbours
        labels = [f"row {self.row}", *(f"training row {one.row} at {amount(one.distance, 3)}" for one in near)]
        targets = ["?", *(amount(one.target) if isinstance(one.target, float) else str(one.target) for one in near)]
        return grid(self, [self.values, *(one.values for one in near)], labels, targets, self.target)


def explained_row(found: Explanation, before: Answer, after: Answer, **own: Any) -> RowExplanation:
    """An explanation with answers in another unit and `own`, what a `RowExplanation` has beside."""
    kept = {one.name: getattr(found, one.name) for one in fields(Explanation)}
    return RowExplanation(**{**kept, "before": before, "after": after, **own})


def in_unit(answer: Answer, amounts: Any, scale: float) -> Answer:
    """An answer in another unit: `amounts` changes values, `scale` widths, and its square variances."""
    return Answer(
        mean=amounts(answer.mean),
        deviation=_times(answer.deviation, scale),
        lower=amounts(answer.lower),
        upper=amounts(answer.upper),
        epistemic=_times(answer.epistemic, scale**2),
    )


def _times(values: Iterable[float], factor: float) -> tuple[float, ...]:
    return tuple(factor * value for value in values)
