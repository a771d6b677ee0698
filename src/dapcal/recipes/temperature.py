"""Whether probabilities, or the noise level, are better off calibrated in the domain first."""

from __future__ import annotations

import math

import torch

from dapcal.adjust import Inflate
from dapcal.adjust.base import is_closed
from dapcal.calibrate import in_domain
from dapcal.data import Labelled
from dapcal.ensembles import base_of
from dapcal.likelihoods import ClassLikelihood
from dapcal.ood_inputs import FEWEST
from dapcal.types import Posterior


def temperature_helps(posterior: Posterior, held_out: Labelled, folds: int = 5) -> bool:
    """Whether in-domain calibration lowers the NLL of rows that it has not seen, by more than one standard error.

    Rows that are hardly ever misclassified do not say how sure to be: the sharpest probabilities would seem the best.
    """
    closed = is_closed(Inflate(), posterior)
    base, n = base_of(posterior, held_out.x, closed), len(held_out.x)
    if isinstance(posterior.likelihood, ClassLikelihood):
        wrong = posterior.likelihood.mean(base).argmax(-1) != held_out.y
        if int(wrong.sum()) < FEWEST:
            return False
    if n < 2 * folds:
        return False
    before = -posterior.likelihood.log_prob(base, held_out.y)
    after = torch.empty_like(before)
    for number in range(folds):
        own = torch.arange(n, device=before.device) % folds == number
        tempered = in_domain(posterior, held_out.subset(~own), closed)
        after[own] = -tempered.likelihood.log_prob(base_of(tempered, held_out.x[own], closed), held_out.y[own])
    gain = before - after
    return bool(gain.mean() > gain.std() / math.sqrt(n))
