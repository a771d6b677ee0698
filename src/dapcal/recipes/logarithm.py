"""Whether positive targets are better learnt as logarithms: asked of boosted trees, before any network is trained.

Prices, costs and durations err in proportion: a logarithm makes their noise even and their tails short. Trees are quick
to ask, and what they say of the noise is what networks say. Each row is predicted by trees that have not seen it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.data import Labelled
from dapcal.likelihoods import Gaussian
from dapcal.recipes.boosting import fit_trees
from dapcal.recipes.crossing import folds
from dapcal.recipes.noise import log_prob_by_halves

FEWEST = 200  # rows that can say it
MOST = 5000  # that are asked, fewer where they are wide:
CELLS = 400_000
RATIO = 3.0  # of the greatest to the least target; within less a logarithm is a line
FOLDS = 3
ROUNDS = 50
MOST_SMEARED = 5.0  # beyond that a few targets make the mean, and rows say nothing of it
ERRORS = 3.0  # standard errors by which the likelihood must gain, and
WORTH = 0.1  # nats a row: noise by the row says the rest, and a line in logarithms runs away far from the data


class Logarithm(NamedTuple):
    """What logarithms change, per row, each with its standard error.

    Attributes:
        gain: in log-likelihood of the target, nats.
        error: of it.
        excess: in squared error of the target in standard deviations; above 0: logarithms are worse.
        excess_error: of it.
        smearing: what medians are to be multiplied by to be means.
    """

    gain: float
    error: float
    excess: float
    excess_error: float
    smearing: float

    @property
    def counts(self) -> bool:
        """Whether targets are to be learnt so: much likelier, beyond doubt, and no less exact."""
        return self.gain > max(ERRORS * self.error, WORTH) and self.excess <= self.excess_error


def may_be_logarithmic(y: Tensor) -> bool:
    """Whether targets (N,) may gain by it: enough of them, above 0, over a range where a logarithm is no line."""
    return len(y) >= FEWEST and bool(y.min() > 0) and bool(y.max() >= RATIO * y.min())


def logarithm(x: Tensor, y: Tensor, seed: int = 0) -> Logarithm:
    """What learning log y in place of y changes.

    Args:
        x: inputs, (N, P).
        y: targets as they are, (N,), all above 0.
        seed: of folds and trees.
    """
    most = max(FEWEST, min(MOST, CELLS // x.shape[1]))
    rows = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:most]
    x, y = x[rows], y[rows].double()
    (center, scale), (log_center, log_scale) = ((float(v.mean()), float(v.std())) for v in (y, y.log()))
    plain, log = (y - center) / scale, (y.log() - log_center) / log_scale
    fold = folds(len(y), seed)
    of_plain, of_log = (_left_out(x, values, fold, seed) for values in (plain, log))
    steeper = (scale / (log_scale * y)).log()  # log |d log/d plain|
    gain = log_prob_by_halves(of_log, log) + steeper - log_prob_by_halves(of_plain, plain)
    back = (log_center + log_scale * of_log).exp()
    factor = smearing(y, back)
    excess = ((factor * back - center) / scale - plain).square() - (of_plain - plain).square()
    return Logarithm(*_mean_and_error(gain), *_mean_and_error(excess), factor)


def smearing(y: Tensor, median: Tensor) -> float:
    """What medians are to be multiplied by to be means: their sum is then that of the targets.

    Duan (1983) takes the mean of y/median. Where errors grow less than in proportion, that is too much for the large
    targets, whose errors weigh most.
    """
    factor = float(y.mean() / median.mean())
    return min(max(factor, 1 / MOST_SMEARED), MOST_SMEARED) if math.isfinite(factor) else 1.0


def smearing_of(y: Tensor, median: Tensor, trees: float) -> float:
    """What the trees say of the factor, as far as the errors of the model that was fitted allow it.

    A median of log-normal errors, of deviation s, is a mean once it is multiplied by exp(s²/2). Trees that know less
    than the model have larger errors, and a factor that is not the model's: it is kept within exp(−s²) and exp(s²).

    Args:
        y: targets as they are that the model did not learn, (N,).
        median: what it predicts, (N,).
        trees: their factor.
    """
    square = float((y.log() - median.log()).square().mean())
    return min(max(trees, math.exp(-square)), math.exp(min(square, 1e2)))


def _left_out(x: Tensor, y: Tensor, fold: Tensor, seed: int) -> Tensor:
    """Predictions (N,) of every row by trees that have learnt the other folds."""
    found = torch.empty_like(y)
    for own in range(FOLDS):
        learnt = Labelled(x[fold % FOLDS != own], y[fold % FOLDS != own, None].to(x))
        trees = fit_trees(learnt, Gaussian(1.0), ROUNDS, seed)
        found[fold % FOLDS == own] = trees(x[fold % FOLDS == own])[:, 0].double()
    return found


def _mean_and_error(values: Tensor) -> tuple[float, float]:
    return float(values.mean()), float(values.std()) / math.sqrt(len(values))
