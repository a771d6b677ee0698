"""Boosted trees beside the networks: tables that trees say more of are predicted as well as by boosting.

    members' outputs f, trees' outputs t ──► share · f + weight · t, of held-out rows that choose

Networks extrapolate smoothly and spread where they do not know; trees find steps and repeated rows. What each is good
for differs from table to table, and few held-out rows say it inexactly. So both weights start at `USUAL`, and move
towards what the rows say best by as much as that gain exceeds its standard error (James and Stein).
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.data import Labelled
from dapcal.likelihoods import Categorical, Gaussian, Likelihood
from dapcal.networks.trees import Blend, Trees, from_histograms, logits
from dapcal.posteriors.network import NetworkPosterior
from dapcal.recipes.noise import beyond_spread
from dapcal.types import Posterior

FEWEST = 50  # rows that choose; fewer say too little, and on tables of their size networks are the better
MOST = 2000  # of those rows that are looked at
MOST_LEARNT = 300_000  # rows that trees learn from, at random; of more they say the same
ROUNDS = 200  # at most
EVERY = 20  # rounds, of which one is the last
DEPTH = 6
USUAL = 0.4  # weight of the trees
SHARES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0)  # of networks and trees that are tried; together:
TOGETHER = (0.5, 1.3)
RATE = 0.1  # of learning; weights below one temper what many rounds are too sure of
_ROUNDING = 1e-9  # what counts as no gain


def with_trees(
    posterior: Posterior, train: Labelled, chooses: Labelled, seed: int, weights: Tensor | None = None
) -> tuple[Posterior, str | None]:
    """The posterior with trees beside its members, and a note; unchanged where that cannot be told or done.

    Args:
        posterior: members trained on the same rows.
        train: what trees learn.
        chooses: held-out rows that say how many rounds and which weights are best.
        seed: of the trees.
        weights: of the rows that they learn, (N,); by default all weigh the same.
    """
    if not (isinstance(posterior, NetworkPosterior) and posterior.linear is None and posterior.gaussian is None):
        return posterior, None
    likelihood = posterior.likelihood
    if (
        not isinstance(likelihood, Categorical | Gaussian)
        or len(chooses.x) < FEWEST
        or not _is_known(train, likelihood)
    ):
        return posterior, None
    if importlib.util.find_spec("sklearn") is None:
        return posterior, "no trees beside the networks: scikit-learn is not installed (pip install scikit-learn)"
    rows = Labelled(chooses.x[:MOST], chooses.y[:MOST])
    trees = fit_trees(train, likelihood, ROUNDS, seed, weights=weights)
    outputs = posterior.outputs(rows.x)  # (S, n, C)
    stages = (trees.leaves(rows.x).cumsum(1) + trees.start)[:, EVERY - 1 :: EVERY].movedim(1, 0)  # (R, n, C')
    found = _weighed(likelihood, outputs, logits(stages, outputs.shape[-1]), rows.y)
    blend = Blend(found.share, found.weight, trees.first((found.stage + 1) * EVERY))
    blended = replace(posterior, blend=blend)
    if isinstance(likelihood, Gaussian):
        blended = replace(blended, likelihood=beyond_spread(likelihood, blended.outputs(rows.x), rows.y))
    told = f"{len(blend.trees.value)} rounds of boosted trees beside the networks: they weigh {found.weight:.2f}, the "
    return blended, told + f"networks {found.share:.2f}"


def same_trees(
    posterior: Posterior, like: Posterior, rows: Labelled, seed: int, most: int = ROUNDS, weights: Tensor | None = None
) -> Posterior:
    """Members with trees fitted to other rows, of as many rounds (at most `most`) and with the weights of `like`."""
    blend = like.blend if isinstance(like, NetworkPosterior) else None
    if blend is None or not isinstance(posterior, NetworkPosterior):
        return posterior
    classes = max(2, len(blend.trees.start)) if isinstance(posterior.likelihood, Categorical) else None
    if classes is not None and len(rows.y.unique()) < classes:  # of one that is missing trees say nothing
        return posterior
    trees = fit_trees(rows, posterior.likelihood, len(blend.trees.value), seed, most, weights)
    return replace(posterior, blend=replace(blend, trees=trees))


def fit_trees(
    rows: Labelled, likelihood: Likelihood, rounds: int, seed: int, most: int = ROUNDS, weights: Tensor | None = None
) -> Trees:
    """Boosted trees of so many rounds; more than `most` become fewer that learn faster."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor  # costs a second

    if len(rows.x) > MOST_LEARNT:
        order = torch.randperm(len(rows.x), generator=torch.Generator().manual_seed(seed))
        rows = rows.subset(order[:MOST_LEARNT].to(rows.x.device))
    x, y = rows.x.cpu().numpy(), rows.y.cpu().numpy()
    of_classes = isinstance(likelihood, Categorical)
    kind = HistGradientBoostingClassifier if of_classes else HistGradientBoostingRegressor
    rate = RATE * max(1.0, rounds / most)
    model = kind(
        learning_rate=rate, max_iter=min(rounds, most), max_depth=DEPTH, l2_regularization=1.0, early_stopping=False,
        categorical_features=None, random_state=seed,
    ).fit(x, y if of_classes else y[:, 0], None if weights is None else weights.cpu().numpy())  # fmt: skip
    trees = from_histograms(model, DEPTH, rows.x.dtype)
    return Trees(*(part.to(rows.x.device) for part in (trees.feature, trees.threshold, trees.value, trees.start)))


class _Weighed(NamedTuple):
    share: float
    weight: float
    stage: int


def _weighed(likelihood: Likelihood, outputs: Tensor, stages: Tensor, y: Tensor) -> _Weighed:
    """The best weights and stage of trees (R, n, C) beside members (S, n, C), drawn towards the usual ones."""
    of_classes = isinstance(likelihood, Categorical)
    outputs, stages = outputs.double(), stages.double()
    tried = [(1 - USUAL, USUAL)]
    if of_classes:
        low, high = TOGETHER
        tried += [(a, b) for a, b in product(SHARES, SHARES) if low <= a + b <= high]
    else:  # trees and networks predict the same number: their weights sum to one
        tried += [(1 - b, b) for b in torch.linspace(0, 0.9, 10).tolist()]
    gains = {
        (stage, a, b): _gain(of_classes, a * outputs + b * stages[stage], y)
        for stage in range(len(stages))
        for a, b in tried
    }
    usual = max((key for key in gains if key[1:] == tried[0]), key=lambda key: float(gains[key].mean()))
    best = max(gains, key=lambda key: float(gains[key].mean()))
    gain = gains[best] - gains[usual]
    if not gain.mean() > _ROUNDING:
        return _Weighed(usual[1], usual[2], usual[0])
    error = float(gain.std() / math.sqrt(len(gain)) / gain.mean())
    moved = 1 - min(1.0, error**2)
    share, weight = (one + moved * (two - one) for one, two in zip(usual[1:], best[1:], strict=True))
    return _Weighed(share, weight, best[0] if moved > 0 else usual[0])


def _gain(of_classes: bool, outputs: Tensor, y: Tensor) -> Tensor:
    """What rows say of outputs (S, n, C), higher is better: log of the mean probability, or − the squared error."""
    if not of_classes:
        return -(outputs.mean(0)[:, 0] - y[:, 0]).square()
    log_p = outputs.log_softmax(-1).logsumexp(0) - math.log(len(outputs))
    return log_p.gather(1, y[:, None])[:, 0]


def _is_known(train: Labelled, likelihood: Likelihood) -> bool:
    """Whether every class has rows to learn, or the targets are one number."""
    if isinstance(likelihood, Categorical):
        return len(train.y.unique()) == int(train.y.max()) + 1
    return train.y.ndim == 2 and train.y.shape[1] == 1
