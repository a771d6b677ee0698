"""How good predictions are where a file of new rows has the target: beside the best answer that looks at no column."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from dapcal.amounts import amount
from dapcal.models.columns import Columns
from dapcal.models.drift import Sample
from dapcal.models.judged_rows import CategoryCounts, Judged, JudgedClasses, JudgedNumbers
from dapcal.models.table import TableModel
from dapcal.tables.targets import Classes, labels_of
from dapcal.tables.values import numbers

_GROUPS = 5
_MOST_CLASSES = 12


@dataclass(frozen=True)
class Quality:
    """Numbers on rows with a target.

    Attributes:
        rows: with a target that could be read.
        skipped: without one, or with a class that training never saw.
        measure: "accuracy" or "RMSE" (in the target's unit).
        value: of the predictions.
        constant: of the most frequent class in training, or of the mean.
        classes: recall and precision by class, and its rows; empty in regression. None where nothing was to be divided.
        coverage: of the intervals; None for classes.
        by_group: rows and coverage over fifths of the prediction, lowest first; empty for classes.
    """

    rows: int
    skipped: int
    measure: str
    value: float
    constant: float
    classes: dict[str, dict[str, Any]]
    coverage: float | None
    by_group: list[dict[str, Any]]


class Judge:
    """Counts what predictions and targets have in common, batch by batch, in bounded memory.

    Args:
        model: what predicts.
        keep: whether `judged` will be asked for: a sample of the rows is kept, and categories are counted.
    """

    def __init__(self, model: TableModel, keep: bool = False) -> None:
        self.model, self.target = model, model.target
        self.sample = Sample() if keep else None
        self.categories = CategoryCounts(model.encoder)
        self.rows = self.skipped = 0
        self.problem: str | None = None
        classes = len(model.classes)
        self.confusion = np.zeros((classes, classes), np.int64)  # (true, predicted)
        self.squared = self.squared_constant = 0.0
        self.mean = 0.0 if model.classes else model.mean_target
        self.edges: np.ndarray | None = None  # between groups of predictions
        self.groups = np.zeros((_GROUPS, 2), np.int64)  # rows, and those inside their interval

    def add(self, columns: Columns, targets: pa.ChunkedArray | None, x: Tensor | None = None) -> None:
        """One batch; targets that cannot be read end it with a note.

        Args:
            columns: predictions.
            targets: of the same rows; None where the file has none.
            x: the encoded rows (N, P), for coverage by category.
        """
        if targets is None or self.problem is not None:
            return
        try:
            self._classes(columns, targets) if isinstance(self.target, Classes) else self._numbers(columns, targets, x)
        except ValueError as error:
            self.problem = f"the target in this file is not looked at: {error}"

    def found(self) -> Quality | None:
        """What there is to tell; None where no row has a target."""
        if not self.rows or self.problem is not None:
            return None
        if isinstance(self.target, Classes):
            return self._of_classes()
        coverage = self.groups[:, 1].sum() / self.rows
        shares = [{"rows": int(n), "coverage": float(inside / n)} for n, inside in self.groups if n]
        value, constant = (math.sqrt(total / self.rows) for total in (self.squared, self.squared_constant))
        return Quality(self.rows, self.skipped, "RMSE", value, constant, {}, float(coverage), shares)

    def judged(self) -> Judged | None:
        """The same and the rows behind it, for plots; None where no row has a target or none was kept."""
        found = self.found()
        if found is None or self.sample is None:
            return None
        table, sample = tuple(table_of(found)), self.sample()
        if isinstance(self.target, Classes):
            return Judged(table, found.rows, JudgedClasses(sample[:, 0].long(), sample[:, 1:]))
        true, predicted, lower, upper, flagged = sample.T
        rows = JudgedNumbers(true, predicted, lower, upper, flagged > 0)
        return Judged(table, found.rows, rows, found.coverage, self.categories.found())

    def _of_classes(self) -> Quality:
        frequent = int(torch.bincount(self.model.train.y.cpu(), minlength=len(self.confusion)).argmax())
        true, predicted = self.confusion.sum(1), self.confusion.sum(0)
        right = np.diag(self.confusion)
        by_class = {
            name: {
                "rows": int(true[place]),
                "recall": float(right[place] / true[place]) if true[place] else None,
                "precision": float(right[place] / predicted[place]) if predicted[place] else None,
            }
            for place, name in enumerate(self.model.classes)
        }
        value, constant = right.sum() / self.rows, true[frequent] / self.rows
        return Quality(self.rows, self.skipped, "accuracy", float(value), float(constant), by_class, None, [])

    def _classes(self, columns: Columns, targets: pa.ChunkedArray) -> None:
        assert isinstance(self.target, Classes)
        text = labels_of(targets, self.target.original, self.model.encoder.target)
        true = pc.fill_null(pc.index_in(text, pa.array(self.target.labels, pa.string())), -1).to_numpy()
        places = {name: place for place, name in enumerate(self.target.labels)}
        predicted = np.array([places[name] for name in columns["prediction"]])
        known = true >= 0
        np.add.at(self.confusion, (true[known], predicted[known]), 1)
        self._counted(known)
        if self.sample is not None:
            self._keep(true[known], *columns["probability"][known].T)

    def _numbers(self, columns: Columns, targets: pa.ChunkedArray, x: Tensor | None) -> None:
        true = numbers(targets, self.model.encoder.target)
        known = ~np.isnan(true)
        prediction, lower, upper = (columns[name].reshape(-1)[known] for name in ("prediction", "lower", "upper"))
        true = true[known]
        is_inside = (lower <= true) & (true <= upper)
        with np.errstate(over="ignore"):  # of targets beyond 1e154 no error is told
            self.squared += float(((prediction - true) ** 2).sum())
            self.squared_constant += float(((self.mean - true) ** 2).sum())
        if self.edges is None and len(prediction):  # the first batch tells what is low and what is high
            self.edges = np.quantile(prediction, np.arange(1, _GROUPS) / _GROUPS)
        if self.edges is not None:
            group = np.searchsorted(self.edges, prediction)
            np.add.at(self.groups, (group, 0), 1)
            np.add.at(self.groups, (group, 1), is_inside)
        self._counted(known)
        if x is not None:
            self.categories.add(x.cpu().numpy()[known], is_inside)
        if self.sample is not None:
            self._keep(true, prediction, lower, upper, columns["ood"][known])

    def _keep(self, *values: np.ndarray) -> None:
        """Rows of the sample, from their columns, (N,) each."""
        assert self.sample is not None
        self.sample.add(torch.from_numpy(np.column_stack(values).astype(float)))

    def _counted(self, known: np.ndarray) -> None:
        self.rows += int(known.sum())
        self.skipped += int((~known).sum())


def words(found: Quality, target: str, level: float) -> str:
    """How good, in a few lines."""
    rows = f"{found.rows:,} rows of this file that have `{target}`"
    if found.measure == "accuracy":
        trivial = f"always the most frequent class: {100 * found.constant:.1f} %"
        lines = [f"Right in {100 * found.value:.1f} % of {rows} ({trivial}){_useless(found)}{_skipped(found, target)}"]
        for name, own in list(found.classes.items())[:_MOST_CLASSES]:
            lines.append(
                f"  {name}: {own['rows']:,} rows, recall {_share(own['recall'])}, precision {_share(own['precision'])}"
            )
        return "\n".join(lines)
    covered = ", ".join(f"{100 * group['coverage']:.0f} %" for group in found.by_group)
    return (
        f"Off by {amount(found.value)} (RMSE) on {rows} (always the mean: {amount(found.constant)}); "
        f"{100 * level:.4g} % intervals hold {100 * (found.coverage or 0):.0f} % of them (from low to high "
        f"predictions: {covered}){_useless(found)}{_skipped(found, target)}"
    )


def _useless(found: Quality) -> str:
    """Words for predictions that do no better than the answer that looks at no column."""
    better = found.value > found.constant if found.measure == "accuracy" else found.value < found.constant
    return "" if better else ". That is no better than looking at no column"


def _skipped(found: Quality, target: str) -> str:
    """Words for rows that predictions are not compared with."""
    if not found.skipped:
        return ""
    others = f"{found.skipped:,} other rows have" if found.skipped > 1 else "1 other row has"
    unknown = ", or a class that the model does not know" if found.measure == "accuracy" else ""
    return f". {others} no `{target}`{unknown}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def table_of(found: Quality) -> list[tuple[str, str, str]]:
    """The same as rows of a table: what, value, beside it the answer that looks at no column."""
    if found.measure == "accuracy":
        rows: list[tuple[str, str, str]] = [
            ("share right", f"{100 * found.value:.1f} %", f"{100 * found.constant:.1f} %")
        ]
        for name, own in list(found.classes.items())[:_MOST_CLASSES]:
            both = f"recall {_share(own['recall'])}, precision {_share(own['precision'])}"
            rows.append((f"{name} ({own['rows']:,} rows)", both, ""))
        return rows
    rows = [("error (root mean square)", amount(found.value), amount(found.constant))]
    rows.append(("targets inside their interval", _share(found.coverage), ""))
    for place, group in enumerate(found.by_group, 1):
        rows.append(
            (f"the same, fifth {place} of the predictions ({group['rows']:,} rows)", _share(group["coverage"]), "")
        )
    return rows
