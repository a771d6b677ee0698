"""A calibrated model of a network that you have trained yourself: asked, saved and shown without further code.

The file names the network's factory and never imports it: who loads the file gives the network again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dapcal import artifact
from dapcal.amounts import amount
from dapcal.artifact import Stored
from dapcal.calibrate import Calibrated
from dapcal.data import Labelled
from dapcal.models import network_files
from dapcal.models.columns import Columns, named
from dapcal.models.factories import moved
from dapcal.models.factories import network as made_by
from dapcal.models.fields import Field, Task
from dapcal.models.formulas import Formulas
from dapcal.models.kept import check_halves, checked_pairs, checked_texts
from dapcal.models.model import NETWORK, PLAIN, Reading, Source, Write, first_inputs
from dapcal.models.row_notes import ignored_note
from dapcal.models.subject import Axis, Picture, Row, Subject
from dapcal.models.tokens import check_tokens
from dapcal.models.writing import writer
from dapcal.png import image_png
from dapcal.posteriors.plain import check_targets
from dapcal.reading import refused_if_damaged
from dapcal.records import ALPHA, LEVEL
from dapcal.trying import with_first_rows

KEPT_HELD_OUT = 2000
KEPT_BYTES = 64 << 20  # of training data, and of held-out data
_SHOWN = 16  # numbers of an input that is not an image


@dataclass(frozen=True, eq=False)
class NetworkModel:
    """A calibrated network (a `dapcal.models.Model`).

    Attributes:
        calibrated: the calibrated posterior.
        held_out: held-out data, at most `KEPT_HELD_OUT` inputs and `KEPT_BYTES`.
        train: training data, None where they take more than `KEPT_BYTES`.
        factory: the name that the network was made by, package.module:factory.
        classes: their names, or those of labels; empty in regression.
        quality: on held-out data that nothing was chosen on: accuracy or rmse, nll_before and nll_after the adjustment.
        rows: places of `held_out` among all the held-out data of the calibration; None: it is all of them, in order.
    """

    calibrated: Calibrated
    held_out: Labelled
    train: Labelled | None = None
    factory: str = ""
    classes: tuple[str, ...] = ()
    quality: dict[str, float] = field(default_factory=dict)
    rows: Tensor | None = None

    kind = NETWORK  # as files name it
    side_by_side = False  # it is of any size, and its steps are long

    @property
    def task(self) -> Task:
        """What is predicted: a class, labels or numbers."""
        return self.calibrated.posterior.likelihood.task

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one input."""
        return tuple(self.calibrated.example.shape[1:])

    def columns(self, x: Tensor, *, level: float = LEVEL, alpha: float = ALPHA) -> Columns:
        """Predictions at inputs (N, ...) by name, in one pass; inputs take the network's precision if they have one."""
        inputs = x.to(self.calibrated.example.dtype) if x.is_floating_point() else x
        check_tokens(self.calibrated.posterior.network, inputs, "x")
        return named(self.calibrated.batches(inputs, max(len(x), 1)), self.classes, level, alpha)

    def read(self, path: Path, reading: Reading = PLAIN) -> Source:
        """Inputs `x` of an npz file, or a folder of images."""
        if reading.keep:
            raise ValueError("--keep copies columns of a table, and this is a network's model; leave it out")
        self._one_tensor()
        return network_files.read(path, reading, self.calibrated.example, self.shades)

    def writer(self, path: Path, formulas: Formulas | None = None) -> AbstractContextManager[Write]:
        """Writes a CSV or npz file."""
        return writer(path, self.classes, formulas)

    def inputs(self, path: Path, most: int) -> Tensor:
        """The first inputs of an npz file, or of a folder of images with pixels from 0 to 1."""
        if path.is_dir() and self.shades != (0.0, 1.0):
            raise ValueError(f"{path} is a folder, and the model's inputs are not pixels from 0 to 1; give an npz file")
        example = self.calibrated.example
        found = first_inputs(self.read(path), most)
        return found.to(example) if path.is_dir() else found.to(example.device)

    def fields(self) -> tuple[Field, ...]:
        """One field, the network's input as nested lists."""
        self._one_tensor()
        targets = self.held_out.y[0].numel()
        if targets > 1:
            noun = "label" if self.classes else "target"
            raise ValueError(f"Expected one {noun} to serve, got {targets}; use `dapcal predict` for several")
        return (Field("x", "array", shape=self.input_shape),)

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> Tensor:
        """Rows of a service, (N, ...)."""
        return torch.tensor([row["x"] for row in rows], dtype=torch.float64).to(self.calibrated.example.dtype)

    def notes_on(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Fields of rows of a service that are not the network's input."""
        known = {field.name for field in self.fields()}
        return ignored_note(dict.fromkeys(name for row in rows for name in row if name not in known))

    def about(self) -> dict[str, Any]:
        """What the file says of the model."""
        return {
            "kind": self.kind,
            "factory": self.factory,
            "task": self.task,
            "classes": list(self.classes),
            "input_shape": list(self.input_shape),
            "quality": self.quality,
        }

    def save(self, path: str | Path, sign: str | Path | None = None) -> None:
        """Write everything but the network's code to one file, complete or not at all."""
        attachments = {"held_out.x": self.held_out.x, "held_out.y": self.held_out.y}
        if self.rows is not None:
            attachments["held_out.rows"] = self.rows
        if self.train is not None:
            attachments |= {"train.x": self.train.x, "train.y": self.train.y}
        artifact.save(self.calibrated, path, self.about(), attachments, sign)

    @property
    def features(self) -> tuple[str, ...]:
        """Flat inputs: the names of their columns."""
        flat = len(self.input_shape) == 1 and self.calibrated.inputs is None
        return tuple(f"x{i}" for i in range(self.input_shape[0])) if flat else ()

    def subject(
        self, title: str, new: Tensor | None = None, new_name: str = "new data", train: Labelled | None = None
    ) -> Subject:
        """What a report is about.

        Args:
            title: of the page.
            new: further inputs to report on.
            new_name: what those are called.
            train: the training data of the calibration, where the file has not kept them.
        """
        train = self.train if train is None else train
        if train is None:
            raise ValueError(
                f"The training data take more than {KEPT_BYTES >> 20} MiB and were not kept with the model, so that "
                "nothing can be shown beside them; calibrate with fewer, or give them again in Python (`train`)"
            )
        features = self.features
        return Subject(
            calibrated=self.calibrated,
            train=on_device(train, self.calibrated.example.device),
            held_out=self.held_out,
            title=title,
            target={"classification": "class", "multi-label": "labels", "regression": "target"}[self.task],
            show=self.show,
            classes=self.classes,
            features=features,
            axes=(Axis("x0"), Axis("x1")) if len(features) == 2 else None,
            new=new,
            new_name=new_name,
            judges=self._judges(),
        )

    def show(self, x: Tensor) -> list[Row | Picture]:
        """Inputs (N, ...) as a person sees them: images of one or three channels as pictures, else numbers by name."""
        if self.calibrated.inputs is not None:
            parts = self.calibrated.inputs.unpack(x)
            return [{name: _some(part[row]) for name, part in parts.items()} for row in range(len(x))]
        if len(self.input_shape) == 3 and self.input_shape[0] in (1, 3) and x.is_floating_point():
            low, high = self.shades
            return [Picture(image_png(image, low, high)) for image in x]
        return [{f"x{i}": _shown(value) for i, value in enumerate(row[:_SHOWN].tolist())} for row in x.flatten(1)]

    @property
    def shades(self) -> tuple[float, float]:
        """Black and white: 0 and 1, or where held-out inputs go beyond these, their smallest and largest value."""
        low, high = float(self.held_out.x.min()), float(self.held_out.x.max())
        return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)

    def _one_tensor(self) -> None:
        """Files hold one array of inputs."""
        if self.calibrated.inputs is not None:
            names = ", ".join(self.calibrated.inputs.names)
            raise ValueError(
                f"This network takes {names}, which no file of one array holds; predict in Python, with "
                "dapcal.load(path, network)"
            )

    def _judges(self) -> Tensor | None:
        """Places in `held_out` of those that p-values are read from, where only a sample is kept."""
        judges = self.calibrated.judges
        if judges is None or self.rows is None:
            return None  # where all are kept, the calibration says it itself
        found = torch.isin(self.rows.cpu(), judges.cpu()).nonzero().flatten()
        return found if len(found) else None


Restored = TypeVar("Restored", bound=NetworkModel)


def restored(stored: Stored, factory: nn.Module | str | None, device: str = "cpu") -> NetworkModel:
    """What `NetworkModel.save` wrote; `factory` as in `dapcal.models.load`."""
    with refused_if_damaged(stored.path):
        name = checked_texts([stored.about["factory"]])[0]
    if factory is None:
        raise ValueError(f"{stored.path} holds no code: give its model, as when it was made, by --model {name!r}")
    made = made_by(factory) if isinstance(factory, str) else factory
    calibrated = stored.calibrated(moved(made, device))
    with refused_if_damaged(stored.path):
        return checked(NetworkModel(**parts_of(stored, calibrated)))


def parts_of(stored: Stored, calibrated: Calibrated) -> dict[str, Any]:
    """What `NetworkModel.save` wrote, by the names of the attributes; a ValueError where it cannot be so."""
    about, attachments, example = stored.about, stored.attachments, calibrated.example
    (factory,), classes = checked_texts([about["factory"]]), checked_texts(about["classes"])
    one, likelihood = calibrated.posterior.outputs(example)[0], calibrated.posterior.likelihood
    if classes and len(classes) != with_first_rows(calibrated)(example).mean.shape[-1]:
        raise ValueError(f"it names {len(classes)} classes, not those that it predicts")
    sets = {
        part: check_targets(
            likelihood, one, checked_pairs(attachments, part, tuple(example.shape[1:]), None, example.device)
        )
        for part in ("held_out", "train")
        if f"{part}.x" in attachments
    }
    return {
        "calibrated": calibrated,
        "held_out": sets["held_out"],
        "train": sets.get("train"),
        "factory": factory,
        "classes": classes,
        "quality": _quality(about["quality"]),
        "rows": attachments.get("held_out.rows"),
    }


def checked(model: Restored) -> Restored:
    """A model that predicts, and whose rows are there."""
    rows = model.rows
    if rows is None:
        check_halves(model.calibrated, len(model.held_out.x))
    elif rows.dtype != torch.int64 or rows.shape != model.held_out.x.shape[:1]:
        raise ValueError("the places of its held-out inputs are not as many as these")
    replace(model, calibrated=with_first_rows(model.calibrated)).columns(model.calibrated.example)
    return model


def _quality(found: Any) -> dict[str, float]:
    if not isinstance(found, dict) or not all(type(value) in (int, float) for value in found.values()):
        raise ValueError("its quality is not a table of numbers")
    return found


def _shown(value: float) -> str:
    """Without commas, as programs read it, too."""
    return amount(value).replace(",", "")


def _some(values: Tensor) -> str:
    """The first numbers of one input."""
    flat = values.flatten()
    return " ".join(map(_shown, flat[:_SHOWN].tolist())) + (" …" if flat.numel() > _SHOWN else "")


def on_device(data: Labelled, device: torch.device) -> Labelled:
    """The data where a network is."""
    return Labelled(data.x.to(device), data.y.to(device))
