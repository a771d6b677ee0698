"""A calibrated model of a table: rows with named columns in, predictions that know their distance out.

rows ──encoder──► x ──calibrated──► Prediction ──target──► rows of predictions
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dapcal import artifact, recipes
from dapcal.artifact import Stored
from dapcal.calibrate import Calibrated
from dapcal.calibration.gap_choice import GapChoice, from_json
from dapcal.data import Labelled, split
from dapcal.evidence import COLUMNS, DOUBT, in_words
from dapcal.explain import FarColumns, far_columns
from dapcal.models import table_files
from dapcal.models.columns import Columns, Unit, flat, in_unit, named
from dapcal.models.drift import FEWEST, Drift, drifts, thinned, words
from dapcal.models.fields import Field
from dapcal.models.formulas import Formulas
from dapcal.models.kept import check_halves, checked_pairs, checked_texts
from dapcal.models.model import PLAIN, TABLE, Reading, Source, Write, first_inputs
from dapcal.models.row_notes import RowNotes
from dapcal.models.subject import Axis, Subject
from dapcal.models.unusual import ONLY_DOUBT, far, unusual
from dapcal.posteriors.trees import TreePosterior
from dapcal.reading import refused_if_damaged
from dapcal.recipes import Recipe
from dapcal.records import ALPHA, LEVEL
from dapcal.storing import check_fields
from dapcal.tables.columns import LIMIT, Category, Number
from dapcal.tables.descriptions import encoder_from_json, target_from_json
from dapcal.tables.encoder import Column, Encoded, Encoder
from dapcal.tables.rows import RowEncoder
from dapcal.tables.targets import Classes, Numbers, TaskName
from dapcal.tables.writing import writer as table_writer
from dapcal.trying import with_first_rows

_NUMBERS_AT_ONCE = 2**22  # outputs of all draws that a prediction holds at a time
_NOT_WRITTEN = ("ood_score",)  # a p-value says it in a unit that people know
_DOUBT = {in_words(DOUBT, is_classes): ONLY_DOUBT[is_classes] for is_classes in (True, False)}  # in words
_SETS = ("train", "held_out")


class Predicted(NamedTuple):
    """Predictions for the rows of a table, and what had to be made up for in them."""

    table: pa.Table
    encoded: Encoded


@dataclass(frozen=True, eq=False)
class TableModel:
    """A calibrated posterior with the columns of its table (a `dapcal.models.Model`).

    Attributes:
        calibrated: predicts from encoded rows.
        encoder: the columns.
        target: classes, or the unit of numbers.
        recipe: what the network looks like and how it was trained.
        train: encoded training rows.
        held_out: encoded held-out rows.
        notes: what was decided on the way, in words.
        gaps: what gap cross-validation chose; None where it was skipped, and in files of earlier versions.
    """

    calibrated: Calibrated
    encoder: Encoder
    target: Classes | Numbers
    recipe: Recipe
    train: Labelled
    held_out: Labelled
    notes: tuple[str, ...]
    gaps: GapChoice | None = None

    @property
    def task(self) -> TaskName:
        """What is predicted: classes or numbers."""
        return "classification" if isinstance(self.target, Classes) else "regression"

    @property
    def classes(self) -> tuple[str, ...]:
        """Their names; empty in regression."""
        return self.target.labels

    @property
    def unit(self) -> Unit:
        """Of the target; the network's own in classification."""
        target = self.target
        return Unit(target.center, target.scale, target.smearing) if isinstance(target, Numbers) else Unit()

    @property
    def mean_target(self) -> float:
        """Of the training rows, as people see it: what one would predict without looking."""
        return float(self.unit.amounts(self.train.y.double().cpu()).mean())

    @property
    def side_by_side(self) -> bool:
        """In main memory: networks and trees of tables are small, and take many short steps."""
        return self.train.x.device.type == "cpu"

    def predict(self, table: pa.Table, *, level: float = LEVEL, alpha: float = ALPHA, first_row: int = 1) -> Predicted:
        """Predictions for rows, in their order: one row out for one row in.

        Columns: `prediction`; `probability_<class>` for every class, or `lower` and `upper`, the interval that holds
        the target with probability `level`; `epistemic` and `aleatoric`, the two parts of the uncertainty (numbers:
        standard deviations in the target's unit; classes: parts of 1 − Σ p²); `distance` from the training rows (0
        within the radius); `ood_p_value`; `ood`, whether that is at most `alpha`; `reason`, why it is, else empty;
        `missing`, the columns without a value; `unusual`, the columns behind a flag and what is unusual about them.

        Args:
            table: rows with the columns of the training table, in any order.
            level: of the intervals.
            alpha: share of ordinary rows that may be called out of distribution.
            first_row: what errors call the first row.
        """
        encoded = self.encoder(table, first_row)
        return Predicted(self.table(self.columns(encoded.x, level=level, alpha=alpha)), encoded)

    def columns(self, x: Tensor, *, level: float = LEVEL, alpha: float = ALPHA) -> Columns:
        """Predictions at encoded rows (N, P) by name, in the target's unit."""
        columns = named(self.calibrated.batches(x, self.rows_at_once), self.classes, level, alpha)
        columns |= {"missing": _objects(self.encoder.missing(x)), "unusual": self._unusual(x, columns)}
        return in_unit(columns, self.unit) if isinstance(self.target, Numbers) else columns

    def read(self, path: Path, reading: Reading = PLAIN) -> Source:
        """The rows of files, or of those in folders, encoded."""
        self.check_reading(reading)
        return table_files.read(self.encoder, [path, *reading.also], reading.keep)

    def check_reading(self, reading: Reading) -> None:
        """Refuse options that are not of a table."""
        given = reading.given("batch_size", "resize", "mean", "std")
        if given:
            raise ValueError(f"A table's model takes no {given} (they are for arrays and images); leave them out")

    @contextmanager
    def writer(self, path: Path, formulas: Formulas | None = None) -> Iterator[Write]:
        """Writes a CSV, TSV or Parquet file; a column beside the predictions that has the name of one gets a mark."""
        with table_writer(path) as append:

            def write(beside: Mapping[str, Any], columns: Columns) -> int:
                table = with_beside(beside, self.table(columns), formulas)
                append(table)
                return len(table)

            yield write

    def inputs(self, path: Path, most: int) -> Tensor:
        """The first rows of a file, encoded, (at most `most`, P)."""
        return first_inputs(self.read(path), most).to(self.train.x.device)

    def fields(self) -> tuple[Field, ...]:
        """A field for every column."""
        return tuple(map(_field, self.encoder.columns))

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> Tensor:
        """Rows of a service, (N, P)."""
        return self._row_encoder(rows)

    def notes_on(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """What was missing, unknown or ignored in rows of a service, in the words of `read`, and which columns differ.

        Columns that differ as a whole from training are told of several rows that came together, if they are enough.
        """
        found = self._row_notes(rows)
        if len(rows) >= FEWEST:
            names = [column.name for column in self.encoder.columns]
            found += words(self.drifts(self.encode([{name: row.get(name) for name in names} for row in rows])))
        return found

    def drifts(self, new: Tensor) -> list[Drift]:
        """Columns of encoded rows (N, P) that differ as a whole from the training rows."""
        return drifts(self.encoder, self._compared, new)

    def halves(self) -> tuple[Labelled, Labelled]:
        """Held-out rows: the half that stopped training and chose φ, and the one that p-values are read from."""
        first, second = (self.held_out.subset(half.to(self.held_out.x.device)) for half in self._rows_of_halves())
        return first, second

    def save(self, path: str | Path, sign: str | Path | None = None) -> None:
        """Write everything to one file, training and held-out rows included (the report shows some of them)."""
        about = {
            "kind": TABLE,
            "encoder": self.encoder.as_json(),
            "target": self.target.as_json(),
            "recipe": asdict(self.recipe),
            "numbers": recipes.numbers_of(self.calibrated.posterior.network),
            "notes": list(self.notes),
            "gaps": None if self.gaps is None else self.gaps.as_json(),
        }
        sets = {"train": self.train, "held_out": self.held_out}
        attachments = {f"{name}.{part}": getattr(data, part) for name, data in sets.items() for part in ("x", "y")}
        artifact.save(self.calibrated, path, about, attachments, sign)

    def subject(self, title: str, new: Tensor | None = None, new_name: str = "new data") -> Subject:
        """What a report is about; `new` are further encoded rows."""
        return Subject(
            calibrated=self.calibrated,
            train=self.train,
            held_out=self.held_out,
            title=title,
            target=self.encoder.target,
            show=lambda x: list(self.encoder.decode(x)),
            classes=self.classes,
            unit=self.unit,
            features=self.encoder.names,
            axes=self._axes(),
            numbers=self._numbers(),
            new=new,
            new_name=new_name,
            judges=self._rows_of_halves()[1],
            gaps=self.gaps,
            drifts=() if new is None else tuple(self.drifts(new)),
            missing=self.encoder.missing,
            unusual=self.unusual,
        )

    def unusual(self, x: Tensor, always: bool = True) -> list[dict[str, str]]:
        """For every encoded row the columns that are unusual by themselves, and what is unusual about them.

        Args:
            x: (N, P).
            always: the most unusual column of a row, if none is unusual by itself.
        """
        return unusual(self.calibrated, self._names, x, always=always)

    def _unusual(self, x: Tensor, columns: Columns) -> np.ndarray:
        """The same where rows are flagged; where no column is unusual by itself, those far from the nearest rows.

        A flag for unusual columns or a distance names one column at least, a flag for doubt none where nothing is far.
        """
        found = np.full(len(x), None, object)
        found[:] = [{} for _ in range(len(x))]
        by_columns = columns["reason"] == in_words(COLUMNS, is_classification=False)
        for rows, always in ((columns["ood"] & ~by_columns, False), (columns["ood"] & by_columns, True)):
            places = np.flatnonzero(rows)
            found[places] = _objects(self.unusual(x[torch.from_numpy(places).to(x.device)], always))
        unnamed = np.flatnonzero(columns["ood"] & ~found.astype(bool))
        by_doubt = np.array([columns["reason"][place] in _DOUBT for place in unnamed], bool)
        away = columns["distance"].reshape(len(x))[unnamed] > 0
        for rows, always in ((~by_doubt, True), (by_doubt & away, False)):
            places = unnamed[rows]
            if len(places):
                own = x[torch.from_numpy(places).to(x.device)]
                found[places] = _objects(far(self._far_columns, own, always, self.calibrated, self._names))
        return found

    @property
    def _names(self) -> list[str]:
        return [column.name for column in self.encoder.columns]

    @cached_property
    def _far_columns(self) -> FarColumns:
        return far_columns(self.train.x, self.encoder.names)

    @property
    def rows_at_once(self) -> int:
        """Rows of one pass: memory grows with draws × rows × outputs."""
        draws = max(self.recipe.draws, self.recipe.members)
        return max(1, min(8192, _NUMBERS_AT_ONCE // (draws * outputs_of(self.target))))

    @cached_property
    def _row_encoder(self) -> RowEncoder:
        return RowEncoder(self.encoder)

    @cached_property
    def _compared(self) -> Tensor:
        """Training rows beside which new ones stand."""
        return thinned(self.train.x).cpu()

    @cached_property
    def _row_notes(self) -> RowNotes:
        return RowNotes(self.encoder)

    def _rows_of_halves(self) -> tuple[Tensor, Tensor]:
        chooses, judges = self.calibrated.chooses, self.calibrated.judges
        if chooses is None or judges is None:  # a file of an earlier version, where the recipe's seed says it
            return split(len(self.held_out.x), torch.Generator().manual_seed(self.recipe.seed))
        return chooses, judges

    def table(self, columns: Columns) -> pa.Table:
        """As it is written, one column a name."""
        written = {name: v for name, v in flat(columns, self.classes).items() if name not in _NOT_WRITTEN}
        named = [", ".join(cells) if cells else "" for cells in written.pop("missing")]
        reasons = [
            "; ".join([f"{name}: {what}" for name, what in row.items()]) if row else _DOUBT.get(reason, "")
            for row, reason in zip(written.pop("unusual"), written["reason"], strict=True)
        ]
        return pa.table({**written, "missing": pa.array(named, pa.string()), "unusual": pa.array(reasons, pa.string())})

    def _numbers(self) -> tuple[Axis, ...]:
        found, start = [], 0
        for column in self.encoder.columns:
            if isinstance(column, Number):
                found.append(Axis(column.name, column.center, column.scale, start, column.magnitude))
            start += column.width
        return tuple(found)

    def _axes(self) -> tuple[Axis, Axis] | None:
        """Of a table of two numbers and nothing else, each of which is one input."""
        columns = self.encoder.columns
        if len(columns) != 2 or not all(isinstance(column, Number) and not column.missing for column in columns):
            return None
        if any(isinstance(column, Number) and column.magnitude is not None for column in columns):
            return None
        places = (0, columns[0].width)
        one, two = (
            Axis(c.name, c.center, c.scale, p) for c, p in zip(columns, places, strict=True) if isinstance(c, Number)
        )
        return one, two


def restored(stored: Stored, device: str = "cpu") -> TableModel:
    """What `TableModel.save` wrote."""
    about, attachments = stored.about, stored.attachments
    with refused_if_damaged(stored.path):
        encoder, target = encoder_from_json(about["encoder"]), target_from_json(about["target"])
        recipe = Recipe(**{**about["recipe"], "hidden": tuple(about["recipe"]["hidden"]), "device": device})
        check_fields(Recipe, asdict(recipe))
        numbers = about.get("numbers", 0)
        if recipe.posterior == recipes.ESTIMATOR:
            _check_kind(stored)
        else:
            _check_size(recipe, encoder, target, numbers, stored)
        train, held_out = (
            checked_pairs(attachments, name, (encoder.width,), len(target.labels), device) for name in _SETS
        )
        gaps = None if about.get("gaps") is None else from_json(about["gaps"])
        notes = checked_texts(about["notes"])
    if recipe.posterior == recipes.ESTIMATOR:  # whose draws are all in the file
        calibrated = stored.calibrated(None, device=device)
    else:
        network = recipes.network(encoder.width, outputs_of(target), recipe, numbers).to(torch.device(device))
        calibrated = stored.calibrated(network)
    model = TableModel(calibrated, encoder, target, recipe, train, held_out, notes, gaps)
    with refused_if_damaged(stored.path):
        check_halves(calibrated, len(held_out.x))
        model.table(replace(model, calibrated=with_first_rows(calibrated)).columns(train.x[:1]))
    return model


def _check_size(recipe: Recipe, encoder: Encoder, target: Classes | Numbers, numbers: Any, stored: Stored) -> None:
    """The network that a recipe describes has as many parameters as are stored, or it is not built."""
    if not isinstance(numbers, int) or not 0 <= numbers <= encoder.width:
        raise ValueError(f"its network takes {numbers!r} numbers, and its table has {encoder.width} columns")
    parameters = recipes.size(encoder.width, outputs_of(target), recipe, numbers)
    held = sum(tensor.numel() for tensor in stored.tensors.values())
    if parameters > held:
        raise ValueError(f"its recipe describes a network of {parameters} parameters and it holds {held} numbers")


def _check_kind(stored: Stored) -> None:
    """A file that is said to hold all that predicts does."""
    if stored.tree["fields"]["posterior"]["kind"] != TreePosterior.__name__:
        raise ValueError("its recipe says that it holds an estimator's trees, and it does not")


def outputs_of(target: Classes | Numbers) -> int:
    """C, of the network."""
    return len(target.labels) or 1


def _field(column: Column) -> Field:
    """A field that no training row lacked must be there, if only as null: a misspelt name is found out.

    The encoder says what takes the place of null. Its limit of a number is the field's.
    """
    required = not column.missing
    if isinstance(column, Number):
        bounds = (_edge(column, -LIMIT), _edge(column, LIMIT))
        return Field(column.name, "number", required=required, bounds=bounds, nullable=True)
    levels = column.levels if isinstance(column, Category) else ()
    return Field(column.name, "category", levels=levels, required=required, nullable=True)


def _edge(column: Number, standardised: float) -> float:
    """The value at the limit, on that side of rounding on which the encoder takes it."""
    edge = column.center + standardised * column.scale
    while abs((edge - column.center) / column.scale) > LIMIT:
        edge = math.nextafter(edge, column.center)
    return edge


def _objects(values: Sequence[Any]) -> np.ndarray:
    """One object a row, whatever it holds, (N,)."""
    found = np.empty(len(values), object)
    found[:] = values
    return found


def with_beside(kept: Mapping[str, Any], predicted: pa.Table, formulas: Formulas | None = None) -> pa.Table:
    """Copied columns before the predictions; one of the same name as a prediction gets a mark."""
    columns = dict(zip(predicted.column_names, predicted.columns, strict=True))
    if formulas is not None:
        kept, columns = formulas.cells(kept, columns)
    marked = {f"input_{name}" if name in columns else name: values for name, values in kept.items()}
    if len(marked) < len(kept):
        raise ValueError("--keep would write two columns of one name (input_…); rename one in the table")
    return pa.table({**marked, **columns})
