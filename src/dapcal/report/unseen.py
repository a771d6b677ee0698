"""Which held-out inputs had no say in φ: quality is measured on those alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.calibrate import Calibrated
from dapcal.data import split
from dapcal.report.predictions import predict

_SEEDS = 100  # of the split, tried in turn
_PROBES = 256  # held-out inputs whose scores are looked for


class Judges(NamedTuple):
    """Held-out inputs that quality is measured on."""

    rows: Tensor  # their places among the held-out inputs, ascending
    unseen: bool  # whether all of them had no say in φ


def judges(calibrated: Calibrated, held_out: Tensor, most: int, seed: int | None = None) -> Judges:
    """The half that did not choose φ, where it can be told, else all; at most `most` of them, by a fixed seed.

    The split is not kept, but its trace is: the sorted OOD scores of the half that gives the p-values. The second half
    that has those scores, by the `seed` of the calibration or by one of the first hundred, is the one; where several
    have (a few rows many times over), none can be told.
    """
    rows, unseen = torch.arange(len(held_out)), False
    if len(calibrated.evidence.held_out) == len(held_out) // 2:
        seeds = range(_SEEDS) if seed is None else (seed,)
        gave = _gave_a_score(calibrated, held_out[:_PROBES])
        halves = (split(len(held_out), torch.Generator().manual_seed(seed))[1].sort().values for seed in seeds)
        fitting = [half for half in halves if gave[half[half < _PROBES]].all()]
        if fitting and all(torch.equal(half, fitting[0]) for half in fitting):
            rows, unseen = fitting[0], True
    return Judges(sample(rows, most).sort().values, unseen)


def sample(rows: Tensor, most: int) -> Tensor:
    """At most `most` of the rows, drawn by a fixed seed."""
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:most]]


def _gave_a_score(calibrated: Calibrated, x: Tensor) -> Tensor:
    """Whether the score of an input is among those that p-values are read from, but for rounding, (N,)."""
    known = calibrated.evidence.held_out.double().cpu()
    score = predict(calibrated, x).score
    place = torch.searchsorted(known, score)
    below, above = known[(place - 1).clamp_min(0)], known[place.clamp_max(len(known) - 1)]
    gap = torch.minimum((score - below).abs(), (score - above).abs())
    return gap <= 1e-4 * (1 + score.abs())
