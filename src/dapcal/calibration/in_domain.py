"""In-domain calibration: one temperature, or one noise level, chosen on held-out data before any distance counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import is_dataclass, replace

import torch
from torch import Tensor

from dapcal.data import Labelled
from dapcal.ensembles import read_by
from dapcal.hardest import FEWEST
from dapcal.likelihoods import Likelihood
from dapcal.types import Ensemble, Posterior

SMALLEST = 20  # rows under which two halves of them say nothing of a scale
SEVERAL = 100  # rows under which a smaller noise level must gain CLEARLY standard errors
CLEARLY = 3
CLOSE = 1e-4  # log factors that are one
_WIDEST = 4.0  # log factor

Read = Callable[[Likelihood], Ensemble]
"""What a network or a posterior says at inputs, for any likelihood (`ensembles.read_by`)."""


def in_domain(posterior: Posterior, held_out: Labelled, drawn: bool = False) -> Posterior:
    """The posterior with the temperature or noise level that minimises the held-out negative log-likelihood.

    Args:
        posterior: a dataclass.
        held_out: in-distribution data that it was not fitted to.
        drawn: see it by its draws, also where it has moments.
    """
    return with_likelihood(posterior, scaled(read_by(posterior, held_out.x, drawn), posterior.likelihood, held_out.y))


def scaled(read: Read, likelihood: Likelihood, y: Tensor) -> Likelihood:
    """The likelihood with the temperature or noise level that is best for these rows."""
    log_prob = _per_row(read, likelihood, y)
    return likelihood.rescaled(_best_factor(lambda factor: -log_prob(factor), -_WIDEST))


def scaled_where_it_helps(read: Read, likelihood: Likelihood, y: Tensor) -> Likelihood:
    """The likelihood with the best temperature or noise level, if that holds on rows that it was not fitted to.

    Two halves of the rows: each is scored with the factor of the other. The factor (then of all rows) is taken if the
    mean gain exceeds its paired standard error. Rows that are hardly ever misclassified do not say how sure to be, and
    the sharpest probabilities would seem best: with fewer than ten wrong ones a temperature may only soften. Likewise
    few rows hold none of the rare large errors that a noise level must cover: fewer than a hundred lower it only if the
    gain is three times its standard error.
    """
    before = likelihood.log_prob(read(likelihood), y)
    if len(y) < SMALLEST or not _can_be_scaled(likelihood):
        return likelihood
    error = likelihood.error(read(likelihood), y)
    of_classes = error.dtype == torch.bool
    lowest = 0.0 if of_classes and int(error.sum()) < FEWEST else -_WIDEST
    log_prob = _per_row(read, likelihood, y)
    after = torch.empty_like(before)
    half = torch.arange(len(y), device=before.device) % 2 == 0
    for one, other in ((half, ~half), (~half, half)):
        factor = _best_factor(lambda f, rows=one: -log_prob(f)[rows], lowest)  # type: ignore[misc]
        after[other] = log_prob(factor)[other]
    gain = after - before
    error_of_mean = gain.std() / math.sqrt(len(y))
    if not gain.mean() > error_of_mean:
        return likelihood
    best = _best_factor(lambda f: -log_prob(f), lowest)
    errors = CLEARLY if best < 1 and len(y) < SEVERAL and not of_classes else 1
    return likelihood.rescaled(best) if gain.mean() > errors * error_of_mean else likelihood


def with_likelihood(posterior: Posterior, likelihood: Likelihood) -> Posterior:
    """The same posterior under another likelihood."""
    if likelihood == posterior.likelihood:
        return posterior
    if not is_dataclass(posterior) or isinstance(posterior, type):
        raise TypeError(
            f"{type(posterior).__name__} is not a dataclass: calibrate its likelihood before, and pass it in"
        )
    return replace(posterior, likelihood=likelihood)


def _per_row(read: Read, likelihood: Likelihood, y: Tensor) -> Callable[[float], Tensor]:
    """log p of every row at a factor on the temperature or noise level."""

    def log_prob(factor: float) -> Tensor:
        scaled = likelihood.rescaled(factor)
        base = read(scaled)
        return scaled.log_prob(base, y.to(base.outputs.device))

    return log_prob


def _best_factor(loss: Callable[[float], Tensor], lowest: float) -> float:
    from scipy.optimize import minimize_scalar

    found = minimize_scalar(
        lambda t: float(loss(math.exp(t)).mean()), bounds=(lowest, _WIDEST), method="bounded", options={"xatol": CLOSE}
    )
    return math.exp(found.x)


def _can_be_scaled(likelihood: Likelihood) -> bool:
    try:
        likelihood.rescaled(1.0)
    except TypeError:  # one of your own that has no such number
        return False
    return True
