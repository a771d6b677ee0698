"""A model of a table as the service sees it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from dapcal.records import ALPHA, LEVEL
from dapcal.serve import Field, Served
from dapcal.tables.columns import LIMIT, Category, Number
from dapcal.tables.model import TableModel
from dapcal.tables.targets import Classes

_KEPT = ("prediction", "epistemic", "aleatoric", "distance", "ood_p_value", "ood")


def served(model: TableModel, name: str, *, alpha: float = ALPHA, level: float = LEVEL) -> Served:
    """Fields for the columns, and a function from rows to records.

    Args:
        model: what predicts.
        name: what the service says it serves.
        alpha: rows with a p-value up to this are out of distribution.
        level: of the intervals.
    """
    types = {c.name: pa.float64() if isinstance(c, Number) else pa.string() for c in model.encoder.columns}

    def predict(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        columns = {name: pa.array([row[name] for row in rows], kind) for name, kind in types.items()}
        found = model.predict(pa.table(columns), alpha=alpha, level=level).table.to_pylist()
        return [_record(model, row, level) for row in found]

    return Served(name, model.task, tuple(map(_field, model.encoder.columns)), model.target.labels, predict)


def _field(column: Number | Category) -> Field:
    """A value may be missing in every column: the encoder says what takes its place. Its limit is the field's."""
    if isinstance(column, Number):
        reach = LIMIT * column.scale
        bounds = (column.center - reach, column.center + reach)
        return Field(column.name, "number", required=False, bounds=bounds)
    return Field(column.name, "category", levels=column.levels, required=False)


def _record(model: TableModel, row: dict[str, Any], level: float) -> dict[str, Any]:
    record = {name: row[name] for name in _KEPT}
    if isinstance(model.target, Classes):
        return {**record, "probabilities": {label: row[f"probability_{label}"] for label in model.target.labels}}
    return {**record, "interval": {"lower": row["lower"], "upper": row["upper"], "level": level}}
