"""A calibrated model of a table: rows with named columns in, predictions that know their distance out.

rows ──encoder──► x ──calibrated──► Prediction ──target──► rows of predictions
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import torch
from torch import Tensor

from dapcal import artifact, recipes
from dapcal.calibrate import Calibrated
from dapcal.data import Labelled, split
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.predictive import Prediction
from dapcal.progress import Stages
from dapcal.recipes import Recipe
from dapcal.records import ALPHA, LEVEL
from dapcal.tables.columns import Number
from dapcal.tables.descriptions import encoder_from_json, target_from_json
from dapcal.tables.encoder import Encoded, Encoder, fit_encoder
from dapcal.tables.files import stream
from dapcal.tables.fitting import alike
from dapcal.tables.targets import Classes, Numbers, TaskName, fit_target, guess, with_target

if TYPE_CHECKING:
    from dapcal.models.subject import Axis, Subject

KIND = "table"
_NUMBERS_AT_ONCE = 2**22  # outputs of all draws that a prediction holds at a time
_MANY_COPIES = 0.1  # share of the rows


def fit(
    table: pa.Table,
    target: str,
    *,
    task: TaskName | None = None,
    recipe: Recipe | None = None,
    drop: Sequence[str] = (),
    progress: Stages | None = None,
) -> TableModel:
    """Learn to predict a column from the others.

    Args:
        table: training rows, as `dapcal.tables.read` gives them.
        target: the column to be predicted; rows without a value of it are left out.
        task: by default guessed from the target, see `dapcal.tables.guess`.
        recipe: network, posterior and how they are trained.
        drop: columns to leave out.
        progress: told (stage, done, total).
    """
    encoder = fit_encoder(table, target, drop)
    rows, left_out = with_target(table, target)
    guessed = guess(rows[target], target)
    goal = fit_target(rows[target], task, target)
    recipe = recipe or Recipe()
    x, y = encoder(rows).x, goal.encode(rows[target], name=target)
    likelihood = Categorical() if isinstance(goal, Classes) else Gaussian(1.0)
    fitted = recipes.fit(x, y, likelihood, _outputs(goal), recipe, progress)
    spelling = alike(goal.labels, f"`{target}`")
    notes = (
        *([] if task else [f"`{target}` holds {guessed.reason}"]),
        *([left_out] if left_out else []),
        *([spelling] if spelling else []),
        *_copies(x, y),
        *encoder.notes,
    )
    return TableModel(fitted.calibrated, encoder, goal, recipe, fitted.train, fitted.held_out, notes)


class Predicted(NamedTuple):
    """Predictions for the rows of a table, and what had to be made up for in them."""

    table: pa.Table
    encoded: Encoded


@dataclass(frozen=True, eq=False)
class TableModel:
    """A calibrated posterior with the columns of its table.

    Attributes:
        calibrated: predicts from encoded rows.
        encoder: the columns.
        target: classes, or the unit of numbers.
        recipe: what the network looks like and how it was trained.
        train: encoded training rows.
        held_out: encoded held-out rows.
        notes: what was decided on the way, in words.
    """

    calibrated: Calibrated
    encoder: Encoder
    target: Classes | Numbers
    recipe: Recipe
    train: Labelled
    held_out: Labelled
    notes: tuple[str, ...]

    @property
    def task(self) -> TaskName:
        """What is predicted: classes or numbers."""
        return "classification" if isinstance(self.target, Classes) else "regression"

    def predict(self, table: pa.Table, *, level: float = LEVEL, alpha: float = ALPHA, first_row: int = 1) -> Predicted:
        """Predictions for rows, in their order: one row out for one row in.

        Columns: `prediction`; `probability_<class>` for every class, or `lower` and `upper`, the interval that holds
        the target with probability `level`; `epistemic` and `aleatoric`, the two parts of the uncertainty (numbers:
        standard deviations in the target's unit; classes: parts of 1 − Σ p²); `distance` from the training rows (0
        within the radius); `ood_p_value`; `ood`, whether that is at most `alpha`.

        Args:
            table: rows with the columns of the training table, in any order.
            level: of the intervals.
            alpha: share of ordinary rows that may be called out of distribution.
            first_row: what errors call the first row.
        """
        encoded = self.encoder(table, first_row)
        batches = encoded.x.to(self.train.x.device).split(self.rows_at_once)
        parts = [self._columns(self.calibrated(x), level, alpha) for x in batches]
        columns = {name: pa.chunked_array([part[name] for part in parts]) for name in parts[0]}
        return Predicted(pa.table(columns), encoded)

    def inputs(self, path: Path, most: int) -> Tensor:
        """The first rows of a file, encoded, (at most `most`, P)."""
        parts: list[Tensor] = []
        rows = 0
        for batch in stream(path, self.encoder.expected):
            parts.append(self.encoder(batch, rows + 1).x[: most - rows])
            rows += len(parts[-1])
            if rows >= most:
                break
        if not parts:
            raise ValueError(f"{path} has no rows; expected at least one")
        return torch.cat(parts).to(self.train.x.device)

    def halves(self) -> tuple[Labelled, Labelled]:
        """Held-out rows: the half that stopped training and chose φ, and the one that p-values are read from."""
        rows = split(len(self.held_out.x), torch.Generator().manual_seed(self.recipe.seed))
        first, second = (self.held_out.subset(half.to(self.held_out.x.device)) for half in rows)
        return first, second

    def save(self, path: str | Path) -> None:
        """Write everything to one file, training and held-out rows included (the report shows some of them)."""
        about = {
            "kind": KIND,
            "encoder": self.encoder.as_json(),
            "target": self.target.as_json(),
            "recipe": asdict(self.recipe),
            "notes": list(self.notes),
        }
        sets = {"train": self.train, "held_out": self.held_out}
        further = {f"{name}.{part}": getattr(data, part) for name, data in sets.items() for part in ("x", "y")}
        artifact.save(self.calibrated, path, about, further)

    def subject(self, title: str, new: Tensor | None = None, new_name: str = "new data") -> Subject:
        """What a report is about; `new` are further encoded rows."""
        from dapcal.models.subject import Subject

        numbers = self.target if isinstance(self.target, Numbers) else Numbers(0.0, 1.0)
        return Subject(
            calibrated=self.calibrated,
            train=self.train,
            held_out=self.held_out,
            title=title,
            target=self.encoder.target,
            show=lambda x: list(self.encoder.decode(x)),
            classes=self.target.labels,
            unit=(numbers.center, numbers.scale),
            features=self.encoder.names,
            axes=self._axes(),
            new=new,
            new_name=new_name,
            seed=self.recipe.seed,
        )

    def _axes(self) -> tuple[Axis, Axis] | None:
        """Of a table of two numbers and nothing else."""
        from dapcal.models.subject import Axis

        columns = self.encoder.columns
        if len(columns) != 2 or not all(isinstance(column, Number) and not column.missing for column in columns):
            return None
        one, two = (Axis(c.name, c.center, c.scale) for c in columns if isinstance(c, Number))
        return one, two

    @property
    def rows_at_once(self) -> int:
        """Rows of one pass: memory grows with draws × rows × outputs."""
        draws = max(self.recipe.draws, self.recipe.members)
        return max(1, min(8192, _NUMBERS_AT_ONCE // (draws * _outputs(self.target))))

    def _columns(self, prediction: Prediction, level: float, alpha: float) -> dict[str, pa.Array]:
        columns: dict[str, Any] = {}
        if isinstance(self.target, Classes):
            columns["prediction"] = self.target.decode(prediction.probs.argmax(-1))
            for label, probability in zip(self.target.labels, prediction.probs.unbind(-1), strict=True):
                columns[f"probability_{label}"] = probability
            parts = {"epistemic": prediction.epistemic, "aleatoric": prediction.aleatoric}
        else:
            ends = prediction.interval(level)
            for name, value in (("prediction", prediction.mean), ("lower", ends.lower), ("upper", ends.upper)):
                columns[name] = self.target.decode(value[:, 0])
            variances = {"epistemic": prediction.epistemic, "aleatoric": prediction.aleatoric}
            parts = {name: self.target.scale * value[:, 0].double().sqrt() for name, value in variances.items()}
        columns |= {
            **parts,
            "distance": prediction.distance,
            "ood_p_value": prediction.ood_p_value,
            "ood": prediction.ood_p_value <= alpha,
        }
        return {name: pa.array(v.cpu().numpy() if isinstance(v, Tensor) else v) for name, v in columns.items()}


def load(path: str | Path, device: str = "cpu") -> TableModel:
    """Read what `TableModel.save` wrote."""
    stored = artifact.open(path)
    about, further = stored.about, stored.attachments
    if about.get("kind") != KIND:
        raise ValueError(_not_a_table(path, about))
    encoder, target = encoder_from_json(about["encoder"]), target_from_json(about["target"])
    recipe = Recipe(**{**about["recipe"], "hidden": tuple(about["recipe"]["hidden"]), "device": device})
    network = recipes.network(encoder.width, _outputs(target), recipe).to(torch.device(device))
    sets = {name: Labelled(further[f"{name}.x"].to(device), further[f"{name}.y"].to(device)) for name in _SETS}
    return TableModel(
        stored.calibrated(network), encoder, target, recipe, sets["train"], sets["held_out"], tuple(about["notes"])
    )


_SETS = ("train", "held_out")


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


def _outputs(target: Classes | Numbers) -> int:
    return len(target.labels) or 1


def _not_a_table(path: str | Path, about: dict[str, Any]) -> str:
    if "factory" in about:
        return (
            f"{path} holds a network of your own ({about['factory']}), not a table's model; use `dapcal score {path}` "
            f"with --model {about['factory']}"
        )
    return f"{path} was not made by `dapcal fit`; load it in Python with dapcal.load(path, model)"
