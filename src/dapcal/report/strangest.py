"""The inputs that look least like the training data, and the training inputs they come nearest to."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.explain import Explanation, explainer
from dapcal.models.subject import Picture, Row, Subject

COUNT, NEIGHBOURS = 6, 3


class Near(NamedTuple):
    """A training input beside a strange one."""

    shown: Row | Picture
    target: tuple[float, ...]  # the class, or the targets as the network sees them
    distance: float


class Strange(NamedTuple):
    """One input far out."""

    rank: int  # by score, from 1
    row: int  # its place in its data, from 0
    shown: Row | Picture
    target: tuple[float, ...]  # empty where it is not known
    explanation: Explanation
    space: str  # that the neighbours are nearest in
    nearest: tuple[Near, ...]


def strangest(subject: Subject, x: Tensor, rows: Tensor, score: Tensor, y: Tensor | None) -> tuple[Strange, ...]:
    """The inputs of the highest OOD scores.

    Args:
        subject: of the report.
        x: inputs (N, ...).
        rows: their places in their data, (N,).
        score: OOD scores, (N,).
        y: their targets, where known.
    """
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
            Strange(
                rank=rank,
                row=int(rows[place]),
                shown=shown[0],
                target=() if y is None else _plain(y[place]),
                explanation=explanation,
                space=nearest.space,
                nearest=tuple(Near(*each) for each in near),
            )
        )
    return tuple(found)


def _plain(target: Tensor) -> tuple[float, ...]:
    return tuple(target.double().flatten().tolist())
