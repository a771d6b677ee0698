"""From a table to a calibrated model of one of its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from dapcal import recipes
from dapcal.amounts import amount
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.models.table import TableModel, outputs_of
from dapcal.models.table_weights import row_weights
from dapcal.models.worth import note as worth_note
from dapcal.posteriors.trees import TreePosterior
from dapcal.progress import Stages
from dapcal.recipes import Bounds, Recipe
from dapcal.tables.coding import with_codes
from dapcal.tables.column_space import column_space
from dapcal.tables.encoder import check_columns, fit_encoder
from dapcal.tables.fitting import alike
from dapcal.tables.row_space import row_space
from dapcal.tables.targets import (
    Classes,
    Numbers,
    TaskName,
    fit_target,
    guess,
    logarithmic,
    with_target,
    without_single,
)
from dapcal.tables.told import note_of
from dapcal.tables.values import numbers

_MANY_COPIES = 0.1  # share of the rows


def fit(
    table: pa.Table,
    target: str,
    *,
    task: TaskName | None = None,
    recipe: Recipe | None = None,
    drop: Sequence[str] = (),
    unusable: Mapping[str, str] | None = None,
    drop_unusable: bool = False,
    progress: Stages | None = None,
    bounds: recipes.Limits | None = None,
    weight: str | None = None,
    class_weights: str | Mapping[str, float] | None = None,
    log: bool | None = None,
    estimators: Sequence[Any] = (),
    numbers: Sequence[str] = (),
) -> TableModel:
    """Learn to predict a column from the others.

    Args:
        table: training rows, as `dapcal.tables.read` gives them.
        target: the column to be predicted; rows without a value of it are left out.
        task: by default guessed from the target, see `dapcal.tables.guess`.
        recipe: network, posterior and how they are trained.
        drop: columns to leave out.
        unusable: columns that reading found to be so, and why.
        drop_unusable: leave these out, and others that would be refused, with a note.
        progress: told (stage, done, total).
        bounds: the least and the greatest value that the target can have, None for no limit: intervals stay within; by
            default 0 where no training row is below it.
        weight: a column of numbers >= 0: how much a row counts in training; no input, and not wanted of new rows.
        class_weights: how much the rows of a class count, by its name, or "balanced": every class as much in all.
        log: whether logarithms of the target are learnt, so that errors count in proportion; by default where
            `dapcal.recipes.logarithm` says that it is likelier so.
        estimators: in place of networks, with a recipe of that posterior, as in `dapcal.recipes.fit`.
        numbers: columns to learn even if they look as if they numbered the rows.
    """
    drop = (*drop, *([weight] if weight is not None and weight not in drop else []))
    check_columns(table, target, drop, unusable, numbers)
    rows, left_out = with_target(table, target)
    rows, single = without_single(rows, target, task)
    guessed = guess(rows[target], target)
    goal = fit_target(rows[target], task, target)
    recipe = recipe or Recipe()
    y = goal.encode(rows[target], name=target)
    train = recipes.training_places(y, recipe, isinstance(goal, Classes))
    plain_encoder = fit_encoder(rows, target, drop, unusable, drop_unusable, numbers, train)
    encoder, x = with_codes(plain_encoder, rows, y, recipe.seed, train)
    found = _logarithm(goal, x, rows[target], log, target, recipe.seed)
    if found is not None:
        goal, recipe = logarithmic(rows[target], found.smearing, target), replace(recipe, logarithms=True)
        y = goal.encode(rows[target], name=target)
        encoder, x = with_codes(plain_encoder, rows, y, recipe.seed, train)
    likelihood = Categorical() if isinstance(goal, Classes) else Gaussian(1.0)
    limits, told = _bounds(goal, y, bounds, target)
    spaces = (column_space(encoder), row_space(recipe.points, recipe.seed))
    weights, weighed = row_weights(rows, y, goal, weight, class_weights)
    fitted = recipes.fit(x, y, likelihood, outputs_of(goal), recipe, progress, spaces, limits, weights, estimators)
    if isinstance(goal, Numbers) and goal.smearing is not None:
        median = fitted.calibrated.judging.predict(fitted.held_out.x).mean
        known, median = (goal.decode(values).flatten() for values in (fitted.held_out.y, median))
        goal = replace(goal, smearing=recipes.smearing_of(known, median, goal.smearing))
    spelling = alike(goal.labels, f"`{target}`")
    notes = (
        *([] if task else [f"`{target}` holds {guessed.reason}"]),
        *note_of(table, target),
        *([left_out] if left_out else []),
        *([single] if single else []),
        *([] if found is None else [_told_of(target, log)]),
        *([told] if told else []),
        *weighed,
        *([spelling] if spelling else []),
        *_copies(x, y),
        *encoder.notes,
    )
    if isinstance(posterior := fitted.calibrated.posterior, TreePosterior):
        recipe = replace(recipe, draws=posterior.count)
    model = TableModel(fitted.calibrated, encoder, goal, recipe, fitted.train, fitted.held_out, notes, fitted.gaps)
    return replace(model, notes=(*notes, *([worthless] if (worthless := worth_note(model)) else [])))


def _logarithm(
    goal: Classes | Numbers, x: Tensor, column: pa.ChunkedArray, asked: bool | None, name: str, seed: int
) -> recipes.Logarithm | None:
    """What there is to know of logarithms, if they are to be learnt: as asked, or where that is likelier."""
    if not isinstance(goal, Numbers):
        if asked:
            raise ValueError(f"`{name}` holds classes, which have no logarithm; leave --log out, or --task regression")
        return None
    amounts = torch.tensor(numbers(column, name))
    if asked and not amounts.min() > 0:
        raise ValueError(f"--log needs a target above 0, and `{name}` goes down to {amount(float(amounts.min()))}")
    if asked is False or not (asked or recipes.may_be_logarithmic(amounts)):
        return None
    found = recipes.logarithm(x, amounts, seed)
    return found if asked or found.counts else None


def _told_of(name: str, asked: bool | None) -> str:
    told = f"`{name}` is learnt as a logarithm, which counts errors in proportion to it; predictions are means of it"
    return told if asked else f"{told}. Held-out rows are likelier so; --no-log learns it as it is"


def _bounds(goal: Classes | Numbers, y: Tensor, given: recipes.Limits | None, name: str) -> tuple[Bounds, str | None]:
    """Bounds in the network's unit, and a note where they were found."""
    if not isinstance(goal, Numbers):
        if given is not None:
            raise ValueError(f"`{name}` holds classes, which have no bounds; leave --bounds out, or --task regression")
        return Bounds(), None
    if given is None and goal.smearing is not None:  # no exponential is below 0
        return Bounds(), None
    least, greatest = (float(goal.decode(end)) for end in (y.min(), y.max()))
    limits = recipes.limits_of(least, greatest, given, f"`{name}`", "--bounds")
    found = given is None and limits[0] is not None
    note = f"no `{name}` is below 0, so no interval goes below it; --bounds=, allows it" if found else None
    return recipes.in_network_unit(limits, goal.standardised), note


def _copies(x: Tensor, y: Tensor) -> list[str]:
    """A note where many rows are alike: one that is held out tests nothing if its twin was learnt from."""
    rows = torch.cat([x, y.reshape(len(x), 1).to(x)], 1).numpy()  # (N, P + 1)
    copies = len(rows) - len({row.tobytes() for row in rows})
    if copies <= _MANY_COPIES * len(rows):
        return []
    return [
        f"{copies:,} of {len(rows):,} rows are copies of others, which makes the model look better than it will be on "
        "new rows; remove copies, unless they are cases of their own"
    ]
