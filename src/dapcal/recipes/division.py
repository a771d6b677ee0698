"""Which rows train and which are held out, and what no network can learn from."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dapcal.data import Labelled
from dapcal.likelihoods import ClassLikelihood, Likelihood
from dapcal.posteriors.training import check_weights as check
from dapcal.recipes.recipe import ESTIMATOR, Recipe

FEWEST_ROWS = 8
FEWEST_HELD_OUT = 4
WEIGHED = ("ensemble", "tabm", ESTIMATOR)  # posteriors that heed weights of rows
WANTED_HELD_OUT = 40  # half of them give p-values: with 20 the smallest possible is 1/21, under 0.05


def divide(data: Labelled, recipe: Recipe, classes: bool) -> tuple[Labelled, Labelled]:
    """Training and held-out rows, in random order; of every class a like share, and at least one row in training."""
    train, held_out = (data.subset(rows.to(data.x.device)) for rows in places(data.y, recipe, classes))
    return train, held_out


def places(y: Tensor, recipe: Recipe, classes: bool) -> tuple[Tensor, Tensor]:
    """Which rows train and which are held out."""
    n = len(y)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(recipe.seed))
    wanted = max(round(recipe.validation * n), min(WANTED_HELD_OUT, n // 3), FEWEST_HELD_OUT)
    wanted = min(wanted, n - FEWEST_ROWS // 2)
    shares = _shares(y.cpu()[order], wanted) if classes else torch.arange(n) < wanted
    if int(shares.sum()) < FEWEST_HELD_OUT:
        raise ValueError(
            f"Only {int(shares.sum())} of {n} rows can be held out (at least {FEWEST_HELD_OUT} are needed), as every "
            "class keeps a row to train on; merge rare classes, or bring more rows of them"
        )
    return order[~shares], order[shares]


def training_places(y: Tensor, recipe: Recipe, classes: bool) -> np.ndarray | None:
    """Which rows will train, ascending; None where too few rows are there to be divided, which `check_rows` refuses."""
    if len(y) < FEWEST_ROWS:
        return None
    return places(y, recipe, classes)[0].sort().values.numpy()


def _shares(y: Tensor, wanted: int) -> Tensor:
    """Which rows are held out, (N,): of each class its share of `wanted`, by largest remainder, but never all rows."""
    classes, label, count = y.unique(return_inverse=True, return_counts=True)
    quota = wanted * count / len(y)
    taken = torch.minimum(quota.floor().long(), count - 1)
    for best in (quota - quota.floor()).argsort(descending=True, stable=True).repeat(2).tolist():
        if int(taken.sum()) < wanted and taken[best] < count[best] - 1:
            taken[best] += 1
    held = torch.zeros(len(y), dtype=torch.bool)
    for number in range(len(classes)):
        held[(label == number).nonzero().flatten()[: taken[number]]] = True
    return held


def check_weights(weights: Tensor | None, data: Labelled, recipe: Recipe) -> Tensor | None:
    """Weights of the rows on their device; None where all weigh the same."""
    if weights is None:
        return None
    if recipe.posterior not in WEIGHED:
        raise ValueError(
            f"Expected `posterior` as one of {', '.join(WEIGHED[:-1])} for rows that weigh differently, got "
            f"{recipe.posterior!r}; leave the weights out, or choose one of those"
        )
    if len(weights) != len(data.x):
        raise ValueError(f"Expected as many weights as rows, got {len(weights)} for {len(data.x)} rows")
    check(weights)
    return None if bool((weights == weights[0]).all()) else weights.to(data.x.device)


def check_rows(data: Labelled, likelihood: Likelihood) -> None:
    """What no network can learn from is refused in words of the table."""
    if len(data.x) < FEWEST_ROWS:
        raise ValueError(
            f"Expected at least {FEWEST_ROWS} rows, got n_samples = {len(data.x)}; half a dozen train the networks and "
            f"{FEWEST_HELD_OUT} calibrate them, a hundred or more are a good start"
        )
    if (data.x == data.x[:1]).all():
        raise ValueError("Expected rows that differ, but all inputs are the same; nothing can be learnt from them")
    if len(data.y.unique(dim=0)) < 2:
        kind = "at least 2 classes, got 1 class" if isinstance(likelihood, ClassLikelihood) else "targets that differ"
        raise ValueError(f"Expected {kind}: all {len(data.y)} targets are the same, so there is nothing to predict")
