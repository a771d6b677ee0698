"""From a table that is too large to hold to a calibrated model: a sample of its rows, and then the others.

file ──one pass──► sample ──► `table_fitting.fit`: columns, calibration, distances
file ──one pass──► other rows, encoded, in a file that a tensor maps ──► members that predict
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from dapcal import recipes
from dapcal.data import Labelled
from dapcal.mapped import Rows
from dapcal.models import table_fitting
from dapcal.models.table import TableModel, outputs_of
from dapcal.models.worth import note as worth_note
from dapcal.progress import Stages
from dapcal.recipes import Recipe
from dapcal.tables import Encoder, Kind, Sample
from dapcal.tables.fitting import ids_left_out
from dapcal.tables.targets import Classes, Numbers, TaskName, usable


def fit(
    sample: Sample,
    stream: Callable[[Mapping[str, Kind]], Iterable[pa.Table]],
    target: str,
    *,
    task: TaskName | None = None,
    recipe: Recipe | None = None,
    drop: Sequence[str] = (),
    unusable: Mapping[str, str] | None = None,
    drop_unusable: bool = False,
    progress: Stages | None = None,
    bounds: tuple[float | None, float | None] | None = None,
    weight: str | None = None,
    class_weights: str | Mapping[str, float] | None = None,
    log: bool | None = None,
    estimators: Sequence[Any] = (),
    numbers: Sequence[str] = (),
) -> TableModel:
    """Learn to predict a column from the others; a sample that is the whole table is fitted as it is.

    Args:
        sample: rows of the table, as `dapcal.tables.sample` gives them.
        stream: all rows of the table in batches, by the kinds of their columns.
        target: as in `dapcal.models.table_fitting.fit`, and so are the others.
        task: classification or regression.
        recipe: network, posterior and how they are trained.
        drop: columns to leave out.
        unusable: columns that reading found to be so, and why.
        drop_unusable: leave these out, with a note.
        progress: told (stage, done, total).
        bounds: of the target.
        weight: a column that says how much rows count in training.
        class_weights: how much the rows of a class count.
        log: whether logarithms of the target are learnt.
        estimators: in place of networks; of a table that is too large to hold they learn the sample alone.
        numbers: columns to learn even if they look as if they numbered the rows.
    """
    recipe, told = recipe or Recipe(), progress or (lambda *_: None)
    if not sample.is_all and recipe.refit and (weight is not None or class_weights is not None):
        raise ValueError(
            f"Expected rows that count alike in a table of {sample.rows:,} rows, too many to hold; leave the weights "
            "out, or use --fast, which learns from a sample of the rows alone"
        )
    counters = [name for name in sample.counters() if name != target and name not in (*drop, *numbers)]
    model = table_fitting.fit(
        sample.table,
        target,
        task=task,
        recipe=recipe if sample.is_all else replace(recipe, refit=False),
        drop=[*drop, *counters],
        unusable=unusable,
        drop_unusable=drop_unusable,
        progress=progress,
        bounds=bounds,
        weight=weight,
        class_weights=class_weights,
        log=log,
        estimators=estimators,
        numbers=numbers,
    )
    if sample.is_all:
        return model
    notes = [
        f"the table has {sample.rows:,} rows, too many to hold: columns, distances and calibration are those of "
        f"{len(sample.table):,} rows drawn at random",
        *map(ids_left_out, counters),
        *([f"the estimator learns {len(model.train.x):,} of these rows, and no others"] if estimators else []),
    ]
    calibrated = model.calibrated
    recipe = replace(model.recipe, refit=recipe.refit)  # which knows of logarithms and draws by now
    if recipe.refit and recipe.posterior in recipes.REFITTED:
        told("encoding all rows", 0, None)
        others, left_out = _encoded(sample.others(stream(_kinds(model))), model.encoder, model.target, target)
        told("encoding all rows", 1, 1)
        fitted = recipes.Fitted(calibrated, model.train, model.held_out, model.gaps)
        calibrated = recipes.trained_on(fitted, others, outputs_of(model.target), recipe, told)
        notes += left_out
    found = replace(model, calibrated=calibrated, recipe=recipe)
    before, after = worth_note(model), worth_note(found)
    of_sample = [one for one in model.notes if one != before]
    return replace(found, notes=(*notes, *of_sample, *([after] if after else [])))


def _kinds(model: TableModel) -> dict[str, Kind]:
    return {**model.encoder.expected, model.encoder.target: model.target.expected}


def _encoded(
    batches: Iterator[pa.Table], encoder: Encoder, goal: Classes | Numbers, target: str
) -> tuple[Labelled, list[str]]:
    """Rows whose target is known, in memory or in files, and notes on what the sample did not show."""
    inputs, targets = Rows(), Rows()
    unknown, imputed, skipped = Counter[str](), Counter[str](), 0
    for batch in batches:
        known = usable(goal, batch[target], target)
        rows = batch.filter(pa.array(known))
        skipped += len(batch) - len(rows)
        if not len(rows):
            continue
        encoded = encoder(rows)
        inputs.append(encoded.x)
        targets.append(goal.encode(rows[target], name=target))
        unknown.update({name: sum(levels.values()) for name, levels in encoded.unknown.items()})
        imputed.update(encoded.imputed)
    if not inputs.count:
        raise ValueError(f"No row beside the sample has a value of `{target}` that it shows; check the column")
    notes = [f"{skipped:,} rows have no `{target}`, or one that the sample lacks: left out"] if skipped else []
    notes += [f"`{name}`: {rows:,} rows have a level that the sample lacks" for name, rows in unknown.items()]
    notes += [
        f"`{name}`: {rows:,} rows have no value, which no row of the sample lacks" for name, rows in imputed.items()
    ]
    return Labelled(inputs.joined, targets.joined), notes
