"""The examples that a report looks at, and what the model says there: held-out ones that judge it, and others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.distances.outliers import noise, shuffled
from dapcal.models.subject import Subject
from dapcal.report.predictions import Predicted, predict, quietly

MOST_JUDGED = 5_000  # held-out or new inputs that are looked at
MOST_SAMPLED = 2_000  # values of a sample, and made-up inputs


class Other(NamedTuple):
    """Inputs that are not held out: what they are called, and what they are in words."""

    name: str
    words: str
    rows: Tensor  # places among the inputs they were drawn from
    x: Tensor


@dataclass(frozen=True, eq=False)
class Examples:
    """What every question of a report is answered from."""

    subject: Subject
    rows: Tensor  # places of those that judge among the held-out inputs, ascending
    is_independent: bool  # whether none of these chose φ
    x: Tensor  # their inputs
    y: Tensor  # their classes (N,), labels (N, L), or targets (N, K) as the network sees them; on the CPU
    held_out: Predicted
    others: tuple[Other, ...]
    other_predictions: tuple[Predicted, ...]

    @property
    def count(self) -> int:
        """How many held-out examples judge."""
        return len(self.x)

    @property
    def is_made_up(self) -> bool:
        """Whether the others are made of training inputs."""
        return self.subject.new is None

    @property
    def named(self) -> list[tuple[str, Predicted]]:
        """All predictions: at held-out inputs, then at the others."""
        names = ["held-out", *(other.name for other in self.others)]
        return list(zip(names, [self.held_out, *self.other_predictions], strict=True))

    @property
    def origin(self) -> str:
        """Which examples judge, in a few words."""
        chose = "none" if self.is_independent else "some"
        return f"On {self.count:,} held-out examples, {chose} of which chose φ."


@quietly()
def gather(subject: Subject) -> Examples:
    """Take the examples, and predict at all of them."""
    calibrated, held_out = subject.calibrated, subject.held_out
    chosen = judges(subject, MOST_JUDGED)
    x, y = held_out.x[chosen.rows.to(held_out.x.device)], held_out.y[chosen.rows.to(held_out.y.device)]
    predicted = predict(calibrated.judging, x, y)
    others = others_of(subject, MOST_SAMPLED if subject.new is None else MOST_JUDGED)
    shape = (len(y),) if subject.is_classification and not subject.has_labels else predicted.after.mean.shape
    return Examples(
        subject=subject,
        rows=chosen.rows,
        is_independent=chosen.are_independent,
        x=x,
        y=y.cpu().reshape(shape).to(torch.long if subject.is_classification else torch.float64),
        held_out=predicted,
        others=tuple(others),
        other_predictions=tuple(predict(calibrated, other.x) for other in others),
    )


def sample(rows: Tensor, most: int) -> Tensor:
    """At most `most` of the rows, drawn by a fixed seed."""
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:most]]


class Judges(NamedTuple):
    """Held-out inputs that quality is measured on."""

    rows: Tensor  # their places among the held-out inputs, ascending
    are_independent: bool  # whether none of them chose φ


def judges(subject: Subject, most: int) -> Judges:
    """The half that did not choose φ, where it is known, else all; at most `most` of them, by a fixed seed."""
    known = subject.judging
    rows = torch.arange(len(subject.held_out.x)) if known is None else known
    return Judges(sample(rows, most).sort().values, known is not None)


def others_of(subject: Subject, most: int) -> list[Other]:
    """New data where there are some, else two kinds of made-up outliers; at most `most` inputs of each."""
    if subject.new is None:
        return _made_up(subject.train.x, most)
    rows = sample(torch.arange(len(subject.new)), most).sort().values
    name = f"{subject.new_name} (new)" if subject.new_name in ("training", "held-out") else subject.new_name
    words = f"{name}: all {len(rows):,}"
    if len(rows) < len(subject.new):
        words = f"{name}: {len(rows):,} of {len(subject.new):,}, drawn at random"
    return [Other(name, words, rows, subject.new[rows.to(subject.new.device)])]


def _made_up(train: Tensor, most: int) -> list[Other]:
    generator = torch.Generator().manual_seed(0)
    rows = sample(torch.arange(len(train)), most)
    taken = train[rows.to(train.device)]
    made = []
    if train.is_floating_point():
        low, high = (train.amin(0), train.amax(0)) if train.ndim == 2 else (train.min(), train.max())
        words = "noise: uniform in a box three times as wide as the training inputs, easy to tell"
        made.append(Other("noise", words, rows, noise(taken.shape, low, high, generator, width=3)))
    if taken[0].numel() > 1 or not made:
        words = "scrambled: every value is that of another training input, so each is ordinary, not their combination"
        made.append(Other("scrambled", words, rows, shuffled(taken, generator)))
    return made
