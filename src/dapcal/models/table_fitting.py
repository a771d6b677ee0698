"""From a table to a calibrated model of one of its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
import torch
from torch import Tensor

from dapcal import recipes
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.models.table import TableModel, outputs_of
from dapcal.progress import Stages
from dapcal.recipes import Recipe
from dapcal.tables.column_space import column_space
from dapcal.tables.encoder import fit_encoder
from dapcal.tables.fitting import alike
from dapcal.tables.targets import Classes, TaskName, fit_target, guess, with_target

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
    """
    encoder = fit_encoder(table, target, drop, unusable, drop_unusable)
    rows, left_out = with_target(table, target)
    guessed = guess(rows[target], target)
    goal = fit_target(rows[target], task, target)
    recipe = recipe or Recipe()
    x, y = encoder(rows).x, goal.encode(rows[target], name=target)
    likelihood = Categorical() if isinstance(goal, Classes) else Gaussian(1.0)
    fitted = recipes.fit(x, y, likelihood, outputs_of(goal), recipe, progress, (column_space(encoder),))
    spelling = alike(goal.labels, f"`{target}`")
    notes = (
        *([] if task else [f"`{target}` holds {guessed.reason}"]),
        *([left_out] if left_out else []),
        *([spelling] if spelling else []),
        *_copies(x, y),
        *encoder.notes,
    )
    return TableModel(fitted.calibrated, encoder, goal, recipe, fitted.train, fitted.held_out, notes, fitted.gaps)


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
