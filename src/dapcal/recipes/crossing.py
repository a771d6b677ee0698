"""Members that leave out a fold each, for tables with few rows: all are learnt, and all say how wide intervals are.

    rows ──► ten folds ──► members without each of them ──► draws of one posterior, fold after fold
                                                       └──► residuals of every row by members that have not seen it

The prediction is the mean of all members, of whom nine of ten have learnt any row. Intervals are those of CV+
(`dapcal.likelihoods.conformal`): of n rows, with K folds, a new row is inside with probability 1 − 2α − √(2/n) at
least, and with about 1 − α in practice. Split conformal intervals would rest on a tenth of the rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dapcal.adjust import Inflate
from dapcal.calibrate import Calibrated
from dapcal.data import Labelled, gather
from dapcal.likelihoods import NormalLikelihood, crossed
from dapcal.networks.trees import side_by_side
from dapcal.posteriors import ensemble
from dapcal.posteriors.network import NetworkPosterior
from dapcal.recipes.boosting import same_trees
from dapcal.recipes.bounds import Bounds
from dapcal.recipes.intervals import has_intervals, with_conformal
from dapcal.recipes.posteriors import Task, Watch
from dapcal.recipes.refit import best_epoch, replaced

FOLDS = 10
MEMBERS = 4  # of every fold, at most: residuals of fewer networks are larger than those of all, and intervals too wide
MOST = 200  # held-out rows, from which those that judge are enough
FEWEST = 40  # rows; with fewer a fold would have less than four


def is_crossed(calibrated: Calibrated, task: Task, held_out: Labelled) -> bool:
    """Whether members are to leave out a fold each: of numbers, where few rows are held out."""
    rows = len(gather(task.train, "train").x)
    return (
        has_intervals(calibrated) and task.recipe.posterior == "ensemble" and len(held_out.x) < MOST and rows >= FEWEST
    )


def crossing(calibrated: Calibrated, task: Task, watch: Watch, held_out: Labelled, bounds: Bounds) -> Calibrated:
    """Members that leave out a fold each predict in place of the old ones, which stay as `before`.

    Args:
        calibrated: of members that learnt about as many rows as those of a fold will.
        task: with all rows to learn.
        watch: what it has seen of those members' epochs.
        held_out: rows that the old members have not learnt.
        bounds: of the targets.
    """
    rows, old, recipe = gather(task.train, "train"), calibrated.posterior, task.recipe
    assert isinstance(old, NetworkPosterior)
    assert isinstance(old.likelihood, NormalLikelihood)
    epochs = best_epoch(watch)
    fold = folds(len(rows.x), recipe.seed)
    size = int((fold != 0).sum())  # the first fold is the largest
    places = [(fold != own).nonzero().flatten()[:size].to(rows.x.device) for own in range(FOLDS)]
    kept = [rows.subset(place) for place in places]
    weights = None if task.weights is None else [task.weights[place] for place in places]
    told = Watch(watch.progress, "training on all rows", 1)
    parts = ensemble.fit_each(
        task.make_for(kept[0]),
        task.likelihood,
        kept,
        None,
        members=min(recipe.members, MEMBERS),
        prior_scale=recipe.prior_scale,
        seed=recipe.seed + 1,
        epochs=task.options["epochs"],
        batch_size=task.options["batch_size"],
        learning_rate=recipe.learning_rate,
        last=epochs,
        row_weights=weights,
        progress=lambda done, _: told.progress(told.stage, done, epochs),
    )
    new = replace(old, draws=torch.cat([part.draws for part in parts]).to(old.draws))
    if old.blend is not None:
        each = [
            same_trees(new, old, own, recipe.seed, weights=None if weights is None else weights[place])
            for place, own in enumerate(kept)
        ]
        trees = [one.blend.trees for one in each if isinstance(one, NetworkPosterior) and one.blend is not None]
        new = replace(new, blend=replace(old.blend, trees=side_by_side(trees), folds=FOLDS))
    changed = replaced(
        calibrated, new, f"networks trained again on all rows, {FOLDS} times without a tenth, {epochs} epochs each"
    )
    changed = _as_far(changed, held_out)
    moments = old.likelihood.moments_of_folds(changed.predict(rows.x).ensemble, FOLDS)
    return with_conformal(changed, crossed(moments, rows.y, fold, *bounds.both))


def _as_far(calibrated: Calibrated, held_out: Labelled) -> Calibrated:
    """Distance widens as much as with the members before.

    Those of several folds lie farther apart, by half and more, and what is multiplied is how far they do. So distances
    count by as much less.
    """
    if not (isinstance(calibrated.adjust, Inflate) and isinstance(calibrated.before, NetworkPosterior)):
        return calibrated
    both = (calibrated.before, calibrated.posterior)
    before, after = (own.outputs(held_out.x).double().std(0, correction=0) for own in both)
    share = min(1.0, float((before / after).nan_to_num(nan=1.0).median()))
    if not 0 < share < 1:
        return calibrated
    phi = calibrated.scale.inverse(torch.tensor(share * calibrated.factor, dtype=torch.float64))
    told = f"these lie {1 / share:.2g} times as far apart, and distances count {share:.2f} times as much"
    return replace(calibrated, phi=float(phi), notes=(*calibrated.notes, told))


def folds(n: int, seed: int) -> Tensor:
    """The fold of every row, (n,): random, of sizes that differ by one at most, the largest first."""
    place = torch.arange(n) % FOLDS
    return place[torch.randperm(n, generator=torch.Generator().manual_seed(seed)).argsort()]


def note(rows: int) -> str:
    """What may be expected of such intervals."""
    return (
        f"intervals by cross-conformal prediction (CV+): as wide as all {rows} rows ask for, each predicted by "
        f"networks that did not learn it; 95 % intervals hold at least "
        f"{max(0.0, 90 - 100 * (2 / rows) ** 0.5):.0f} % of the targets as far as settings were fixed beforehand (a "
        "few are chosen on these rows), and about 95 % in practice"
    )
