"""Members trained on more rows than memory holds, once a sample of these has said all else.

A sample of the rows trains members, chooses and calibrates, as for any table; distances are those to its training rows.
Then new members learn from the other rows, a minibatch at a time, and predict in place of the old ones.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dapcal.calibrate import Calibrated
from dapcal.data import Labelled
from dapcal.likelihoods import Categorical, ClassLikelihood, Gaussian, NormalLikelihood
from dapcal.progress import Stages
from dapcal.recipes.bounds import Bounds
from dapcal.recipes.fitting import Fitted
from dapcal.recipes.intervals import with_intervals
from dapcal.recipes.posteriors import RUNS, Task, Watch, one_thread, schedule_of
from dapcal.recipes.recipe import Recipe, maker
from dapcal.recipes.refit import REFITTED, refitted

MOST_SEEN = {"ensemble": 10_000_000, "tabm": 2_000_000}  # rows that a member sees in all, one after the other
BATCH = 1024  # rows in a step


def trained_on(fitted: Fitted, others: Labelled, outputs: int, recipe: Recipe, told: Stages) -> Calibrated:
    """What was fitted to a sample, with members that have learnt from other rows of the table.

    Held-out rows of the sample are not among the others: by those that chose φ it is decided whether the new members
    are better, and those that judge give the intervals.

    Args:
        fitted: to the sample.
        others: rows that are not in it, in memory or in files.
        outputs: C, of the network.
        recipe: how.
        told: of epochs while "training on all rows".
    """
    old = fitted.calibrated
    if recipe.posterior not in REFITTED:
        return old
    others = _drawn(others, MOST_SEEN[recipe.posterior], recipe.seed)
    epochs = recipe.epochs or max(
        1, min(MOST_SEEN[recipe.posterior] // len(others.x), schedule_of(recipe, len(others.x))[1])
    )
    watch = Watch(told, "training on all rows", RUNS.get(recipe.posterior, recipe.members), [(0.0, epochs)])
    make = maker(fitted.train, outputs, recipe)
    task = Task(
        make_for=lambda _: make,
        likelihood=Categorical() if isinstance(old.posterior.likelihood, ClassLikelihood) else Gaussian(1.0),
        train=(others.x, others.y),
        watched=(others.x[:1], others.y[:1]),  # nobody watches: members stop at their last epoch
        recipe=recipe,
        options={
            "epochs": epochs,
            "batch_size": recipe.batch_size or min(BATCH, max(len(others.x) // 10, 16)),
            "learning_rate": recipe.learning_rate,
            "patience": 1,
        },
    )
    with one_thread():
        new = refitted(old, task, watch)
    told_of = f"networks trained on {len(others.x):,} other rows, {epochs} times each"
    if not _is_better(new, old, fitted.held_out):
        kept = f"{told_of}, are not better at held-out rows: those of the sample stay"
        return replace(old, notes=(*old.notes, kept))
    likelihood = new.posterior.likelihood
    if isinstance(likelihood, NormalLikelihood) and likelihood.conformal is not None:
        bounds = Bounds(likelihood.conformal.lower, likelihood.conformal.upper)
        new = with_intervals(new, fitted.held_out, bounds)
    return replace(new, notes=(*old.notes, told_of))


def _drawn(rows: Labelled, most: int, seed: int) -> Labelled:
    """As many rows at most, at random."""
    if len(rows.x) <= most:
        return rows
    return rows.subset(torch.randperm(len(rows.x), generator=torch.Generator().manual_seed(seed))[:most])


def _is_better(new: Calibrated, old: Calibrated, held_out: Labelled) -> bool:
    """Whether the rows that chose φ, of which neither has seen any, are predicted better."""
    assert old.chooses is not None
    rows = held_out.subset(old.chooses.to(held_out.x.device))
    gain = [float(one.predict(rows.x).log_prob(rows.y.cpu()).double().mean()) for one in (new, old)]
    return gain[0] > gain[1]
