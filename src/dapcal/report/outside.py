"""Inputs away from the data: those the report is given, else outliers made of the training inputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.models.subject import Subject
from dapcal.report.unseen import sample


class Outside(NamedTuple):
    """Further inputs, what they are called, and what they are in words."""

    name: str
    words: str
    rows: Tensor  # places among the inputs they were drawn from
    x: Tensor


def outside(subject: Subject, most: int) -> list[Outside]:
    """New data where there are some, else two kinds of made-up outliers; at most `most` inputs of each."""
    if subject.new is None:
        return _made_up(subject.train.x, most)
    rows = sample(torch.arange(len(subject.new)), most).sort().values
    name = f"{subject.new_name} (new)" if subject.new_name in ("training", "held-out") else subject.new_name
    words = f"{name}: all {len(rows):,}"
    if len(rows) < len(subject.new):
        words = f"{name}: {len(rows):,} of {len(subject.new):,}, drawn at random"
    return [Outside(name, words, rows, subject.new[rows.to(subject.new.device)])]


def _made_up(train: Tensor, most: int) -> list[Outside]:
    generator = torch.Generator().manual_seed(0)
    rows = sample(torch.arange(len(train)), most)
    taken = train[rows.to(train.device)]
    made = []
    if train.is_floating_point():
        low, high = (train.amin(0), train.amax(0)) if train.ndim == 2 else (train.min(), train.max())
        uniform = torch.rand(taken.shape, generator=generator).to(train)
        words = "noise: uniform in a box three times as wide as the training inputs, easy to tell"
        made.append(Outside("noise", words, rows, low + (3 * uniform - 1) * (high - low)))
    if taken[0].numel() > 1 or not made:
        flat = taken.flatten(1)
        order = torch.rand(flat.shape, generator=generator).argsort(0).to(train.device)
        words = "scrambled: every value is that of another training input, so each is ordinary, not their combination"
        made.append(Outside("scrambled", words, rows, flat.gather(0, order).reshape(taken.shape)))
    return made
