"""What a report is about: a calibrated posterior, its data, and how both look to a person."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from dapcal.calibrate import Calibrated
from dapcal.calibration.gap_choice import GapChoice
from dapcal.data import Labelled, check_inputs
from dapcal.likelihoods import Likelihood
from dapcal.models.columns import Unit
from dapcal.models.drift import Drift
from dapcal.models.judged_rows import Judged

Row = dict[str, str]
"""A table's row as a person reads it: column name to text."""


class Picture(NamedTuple):
    """An image as a person sees it."""

    png: bytes


class Axis(NamedTuple):
    """One of two inputs: shown value = center + scale · input."""

    name: str
    center: float = 0.0
    scale: float = 1.0
    place: int | None = None  # its input column; None: the first for the first axis, the second for the second
    magnitude: Callable[[np.ndarray], np.ndarray] | None = None  # of the shown value; the last of the column's inputs


@dataclass(frozen=True, eq=False)
class Subject:
    """What the report tells of.

    Attributes:
        calibrated: the calibrated posterior.
        train: the training data of the calibration, inputs as the network takes them, in the same order.
        held_out: its held-out data, all of them and in the same order; targets as the likelihood wants them.
        title: of the page, e.g. "house.dap".
        target: what is predicted, e.g. "price".
        show: inputs (N, ...) to what a person sees, N rows or pictures.
        classes: their names, or those of the labels; empty in regression.
        unit: regression: of the target as people see it.
        features: flat inputs: for each input column the name of the table's column that it comes from.
        axes: inputs that two numbers decide: what the two are called and how they are shown; other input columns,
            such as marks of missing values, are 0 in training.
        numbers: flat inputs: those columns of the table that hold numbers, and how they are shown.
        new: further inputs to report on.
        new_name: what those are called.
        judges: rows of `held_out` that p-values are read from, on which nothing was chosen; by default those that
            `calibrated` knows of.
        gaps: what gap cross-validation chose, where it was asked.
        drifts: of a table: columns of `new` that differ from training as a whole.
        judged: of a table: what targets among the new data say of predictions.
        missing: of a table: inputs to the columns without a value, of each.
        unusual: of a table: inputs to the columns that are unusual by themselves, and what is unusual about them.
    """

    calibrated: Calibrated
    train: Labelled
    held_out: Labelled
    title: str
    target: str
    show: Callable[[Tensor], list[Row | Picture]]
    classes: tuple[str, ...] = ()
    unit: Unit = field(default_factory=Unit)
    features: tuple[str, ...] = ()
    axes: tuple[Axis, Axis] | None = None
    numbers: tuple[Axis, ...] = ()
    new: Tensor | None = None
    new_name: str = "new data"
    judges: Tensor | None = None
    gaps: GapChoice | None = None
    drifts: tuple[Drift, ...] = ()
    judged: Judged | None = None
    missing: Callable[[Tensor], list[list[str]]] | None = None
    unusual: Callable[[Tensor], list[dict[str, str]]] | None = None

    def __post_init__(self) -> None:
        if self.likelihood.task == "per-place":
            raise ValueError(
                "A report is of one answer an input, and PerPlace has one for every place; look at "
                "calibrated.summary() and calibrated.predict(x).columns()"
            )
        for name, x in (("train", self.train.x), ("held_out", self.held_out.x), ("new", self.new)):
            if x is not None:
                check_inputs(x, name, like=self.calibrated.example)
        if self.is_classification != bool(self.classes):
            kind = "the names of classes or labels" if self.is_classification else "none, as this is a regression"
            raise ValueError(f"Expected in `classes` {kind}, got {len(self.classes)}")
        if self.unit.scale == 0:
            raise ValueError("Expected `unit` with a scale other than 0, got 0")

    @property
    def is_classification(self) -> bool:
        """Whether classes or labels are predicted."""
        return self.likelihood.task != "regression"

    @property
    def has_labels(self) -> bool:
        """Whether an input may have several labels."""
        return self.likelihood.task == "multi-label"

    @property
    def likelihood(self) -> Likelihood:
        """What outputs say about targets."""
        return self.calibrated.judging.posterior.likelihood

    @property
    def judging(self) -> Tensor | None:
        """Rows of `held_out` on which nothing was chosen, ascending; None where that is not known."""
        chooses, judges = self.calibrated.chooses, self.calibrated.judges
        if self.judges is not None:
            return self.judges.cpu().sort().values
        if chooses is None or judges is None or len(chooses) + len(judges) != len(self.held_out.x):
            return None  # a file of an earlier version, or other held-out data
        return judges.cpu().sort().values
