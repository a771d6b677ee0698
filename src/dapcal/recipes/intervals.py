"""Intervals that hold what they promise: residuals of the judging rows, the bounds of the target, and a note."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from scipy.special import betaincinv  # scipy.stats takes a second to import
from torch import Tensor

from dapcal.calibrate import Calibrated
from dapcal.data import Labelled
from dapcal.likelihoods import Conformal, NormalLikelihood, scores_of
from dapcal.recipes.bounds import Bounds
from dapcal.records import LEVEL

FEW = 100  # judging rows, below which it is told how far the coverage may be off


def has_intervals(calibrated: Calibrated) -> bool:
    """Whether targets are numbers, whose intervals judging rows can say."""
    return isinstance(calibrated.posterior.likelihood, NormalLikelihood) and calibrated.judges is not None


def with_intervals(
    calibrated: Calibrated, held_out: Labelled, bounds: Bounds, apart: Tensor | None = None
) -> Calibrated:
    """Intervals by the residuals of the rows that judge, on which nothing else was chosen; of classes as it was.

    Residuals are divided by the predictive standard deviation, which knows the row and its distance: where that is
    larger the interval is wider. Members that were trained again have not learnt those rows.

    Args:
        calibrated: what predicts.
        held_out: its held-out rows.
        bounds: of the target.
        apart: places of those that judge and that no member has learnt; by default all that judge.
    """
    if not has_intervals(calibrated):
        return calibrated
    assert calibrated.judges is not None
    rows = held_out.subset((calibrated.judges if apart is None else apart).to(held_out.x.device))
    found = calibrated(rows.x)
    scores = scores_of(found.mean, found.variance, rows.y, *bounds.both)
    return with_conformal(calibrated, Conformal(scores, *bounds.both))


def with_conformal(calibrated: Calibrated, conformal: Conformal) -> Calibrated:
    """The same posterior with those intervals; distances stay with the members that were there before a refit."""
    posterior = calibrated.posterior
    likelihood = replace(posterior.likelihood, conformal=conformal)  # type: ignore[type-var]
    if calibrated.before is None:
        return calibrated.with_likelihood(likelihood)
    return replace(calibrated, posterior=replace(posterior, likelihood=likelihood))  # type: ignore[type-var]


def note(rows: int, level: float = LEVEL) -> str:
    """What may be expected of intervals that so many rows were judged by.

    >>> note(500)
    'intervals are as wide as 500 judging rows ask for'
    """
    if told := few_for(rows, level):
        return told
    told = f"intervals are as wide as {rows} judging rows ask for"
    if rows >= FEW:
        return told
    rank = torch.tensor((rows + 1) * level).ceil().item()
    low, high = betaincinv(rank, rows + 1 - rank, [0.05, 0.95])
    return (
        f"{told}, which are few: {100 * level:.4g} % intervals hold between {100 * low:.0f} and {100 * high:.0f} % of "
        "the targets in nine of ten such tables"
    )


def few_for(rows: int, level: float) -> str | None:
    """What stands in for residuals where judging rows are too few for intervals of that level; None where they do.

    >>> few_for(19, 0.95) is None, few_for(18, 0.95) is None, few_for(98, 0.99) is None
    (True, False, False)
    """
    needed = math.ceil(level / (1 - level) - 1e-9)
    if rows >= needed:
        return None
    return (
        f"{rows} judging rows are too few for intervals of {100 * level:g} % that are sure to hold as many targets "
        f"({needed:,} are needed): they are as wide as the largest residual, or a Gaussian if that is wider"
    )


def few_judges(calibrated: Calibrated, level: float) -> str | None:
    """The same of a model; None also where no residuals say its intervals."""
    conformal = getattr(calibrated.posterior.likelihood, "conformal", None)
    if conformal is None or not len(conformal.scores):
        return None
    return few_for(len(conformal.scores), level)
