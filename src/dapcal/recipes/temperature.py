"""Whether probabilities, or the noise level, are better off calibrated in the domain first."""

from __future__ import annotations

import math

import torch

from dapcal.calibration.in_domain import in_domain
from dapcal.data import Labelled
from dapcal.ensembles import seen
from dapcal.hardest import FEWEST
from dapcal.types import Posterior


def temperature_helps(posterior: Posterior, held_out: Labelled, folds: int = 5) -> bool:
    """Whether in-domain calibration lowers the NLL of rows that it has not seen, by more than one standard error.

    Rows that are hardly ever misclassified do not say how sure to be: the sharpest probabilities would seem the best.
    """
    base, n = seen(posterior, held_out.x), len(held_out.x)
    error = posterior.likelihood.error(base, held_out.y)
    if error.dtype == torch.bool and int(error.sum()) < FEWEST:
        return False
    if n < 2 * folds:
        return False
    before = -posterior.likelihood.log_prob(base, held_out.y)
    after = torch.empty_like(before)
    for number in range(folds):
        own = torch.arange(n, device=before.device) % folds == number
        tempered = in_domain(posterior, held_out.subset(~own))
        after[own] = -tempered.likelihood.log_prob(seen(tempered, held_out.x[own]), held_out.y[own])
    gain = before - after
    return bool(gain.mean() > gain.std() / math.sqrt(n))
