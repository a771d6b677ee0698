"""A network of one's own as the service sees it: one field, its input as nested lists."""

from __future__ import annotations

from typing import Any, Literal

import torch

from dapcal.own.model import OwnModel
from dapcal.own.scores import columns_of
from dapcal.serve import Field, Served
from dapcal.types import ALPHA, LEVEL

_KEPT = ("epistemic", "aleatoric", "distance", "ood_p_value", "ood")


def served(model: OwnModel, name: str, *, alpha: float = ALPHA, level: float = LEVEL) -> Served:
    """A field `x` of the network's input shape, and a function from rows to records.

    Args:
        model: what predicts.
        name: what the service says it serves.
        alpha: inputs with a p-value up to this are out of distribution.
        level: of the intervals.
    """
    targets = model.held_out.y[0].numel()
    if not model.classes and targets > 1:
        raise ValueError(f"Expected one target to serve, got {targets}; use `dapcal score` for several")
    example = model.calibrated.example

    def predict(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        x = torch.tensor([row["x"] for row in rows], dtype=torch.float64).to(example.dtype)
        columns = columns_of(model.predict(x), model.classes, level, alpha)
        return [_record(model, {n: values[place] for n, values in columns.items()}, level) for place in range(len(x))]

    task: Literal["classification", "regression"] = "classification" if model.classes else "regression"
    return Served(name, task, (Field("x", "array", shape=model.input_shape),), model.classes, predict)


def _record(model: OwnModel, row: dict[str, Any], level: float) -> dict[str, Any]:
    record = {name: row[name].reshape(()).item() for name in _KEPT}
    if model.classes:
        probabilities = dict(zip(model.classes, row["probability"].tolist(), strict=True))
        return {**record, "prediction": str(row["prediction"]), "probabilities": probabilities}
    mean, lower, upper = (float(row[name].reshape(())) for name in ("prediction", "lower", "upper"))
    return {**record, "prediction": mean, "interval": {"lower": lower, "upper": upper, "level": level}}
