"""Intervals that hold what they promise: residuals of the judging rows, the bounds of the target, and a note."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from scipy.stats import beta

from dapcal.calibrate import Calibrated
from dapcal.data import Labelled
from dapcal.likelihoods import Conformal, NormalLikelihood, scores_of
from dapcal.records import LEVEL

FEW = 100  # judging rows, below which it is told how far the coverage may be off
FEWEST = 19  # judging rows that a 95 % interval takes


@dataclass(frozen=True)
class Bounds:
    """The least and the greatest value of a target, in the network's unit; None: there is none."""

    lower: float | None = None
    upper: float | None = None


def with_intervals(calibrated: Calibrated, held_out: Labelled, bounds: Bounds) -> Calibrated:
    """Intervals by the residuals of the rows that judge, on which nothing else was chosen; of classes as it was.

    Residuals are divided by the predictive standard deviation, which knows the row and its distance: where that is
    larger the interval is wider.
    """
    likelihood, judges = calibrated.posterior.likelihood, calibrated.judges
    if not isinstance(likelihood, NormalLikelihood) or judges is None:
        return calibrated
    rows = held_out.subset(judges.to(held_out.x.device))
    found = calibrated(rows.x)
    conformal = Conformal(scores_of(found.mean, found.variance, rows.y), bounds.lower, bounds.upper)
    wider = calibrated.with_likelihood(replace(likelihood, conformal=conformal))  # type: ignore[type-var]
    return replace(wider, notes=(*calibrated.notes, note(len(rows.x))))


def note(rows: int, level: float = LEVEL) -> str:
    """What may be expected of intervals that so many rows were judged by.

    >>> note(500)
    'intervals are as wide as 500 judging rows ask for'
    """
    if rows < FEWEST:
        return (
            f"{rows} judging rows are too few for intervals of {100 * level:.0f} % that are sure to hold as many "
            f"targets ({FEWEST} are needed): they are as wide as the largest residual, or a Gaussian if that is wider"
        )
    told = f"intervals are as wide as {rows} judging rows ask for"
    if rows >= FEW:
        return told
    rank = torch.tensor((rows + 1) * level).ceil().item()
    low, high = beta.ppf([0.05, 0.95], rank, rows + 1 - rank)
    return (
        f"{told}, which are few: {100 * level:.0f} % intervals hold between {100 * low:.0f} and {100 * high:.0f} % of "
        "the targets in nine of ten such tables"
    )
