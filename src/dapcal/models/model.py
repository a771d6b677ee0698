"""What every command asks of a model, whether it is a table's or a network's.

file ──read──► batches of inputs ──columns──► predictions by name ──writer──► file
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dapcal.calibrate import Calibrated
from dapcal.models.columns import Columns
from dapcal.models.fields import Field, Task
from dapcal.models.formulas import Formulas
from dapcal.models.subject import Subject
from dapcal.records import ALPHA, LEVEL

TABLE, NETWORK, TEXT = "table", "model", "text"
"""Kinds, as files name them."""


class Model(Protocol):
    """A calibrated posterior that knows what its inputs and targets mean."""

    @property
    def calibrated(self) -> Calibrated:
        """What predicts, from inputs as the network takes them."""
        ...

    @property
    def task(self) -> Task:
        """What is predicted: a class, labels or numbers."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """Their names, or those of labels; empty in regression."""
        ...

    @property
    def side_by_side(self) -> bool:
        """Whether several threads with a batch each are sooner done than one batch after the other by all of them."""
        ...

    def columns(self, x: Tensor, *, level: float = LEVEL, alpha: float = ALPHA) -> Columns:
        """Predictions at inputs (N, ...) by name, numbers in the target's unit and classes by theirs.

        Args:
            x: inputs as `read`, `inputs` and `encode` give them.
            level: probability that an interval holds the target.
            alpha: inputs with a p-value up to this are out of distribution.
        """
        ...

    def read(self, path: Path, reading: Reading = ...) -> Source:
        """The inputs of a file or folder, in batches."""
        ...

    def writer(self, path: Path, formulas: Formulas | None = None) -> AbstractContextManager[Write]:
        """Writes predictions batch by batch; the file appears when all is well.

        Args:
            path: of the file.
            formulas: finds texts that a spreadsheet would run; None where no spreadsheet opens the file.
        """
        ...

    def inputs(self, path: Path, most: int) -> Tensor:
        """The first inputs of a file or folder, at most `most`, where the network is."""
        ...

    def fields(self) -> tuple[Field, ...]:
        """What a row of a service holds."""
        ...

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> Tensor:
        """Rows of a service ({field: value, None where unknown}) as inputs."""
        ...

    def notes_on(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """What there is to know of rows of a service as they were sent, in words: missing values, ignored fields.

        May be asked by several threads at a time.
        """
        ...

    def subject(self, title: str, new: Tensor | None = None, new_name: str = "new data") -> Subject:
        """What a report is about; `new` are further inputs."""
        ...

    def save(self, path: str | Path, sign: str | Path | None = None) -> None:
        """Write everything but a network's code to one file, complete or not at all, signed by a key's file or not."""
        ...


@dataclass(frozen=True)
class Reading:
    """How a file is read: options of `dapcal predict`, which a model refuses where they do not concern its kind.

    Attributes:
        keep: columns of a table to hand on beside the inputs.
        batch_size: a network's inputs at a time; None: 256.
        resize: whether images of another size are resized.
        mean: that pixels from 0 to 1 were normalised with in training; None: 0.
        std: likewise; None: 1.
        also: files of the same table that come after the first, in their order.
    """

    keep: tuple[str, ...] = ()
    batch_size: int | None = None
    resize: bool = False
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    also: tuple[Path, ...] = ()

    def given(self, *names: str) -> str:
        """Those options that differ from their defaults, as they are typed; empty where none does."""
        found = [name for name in names if getattr(self, name) != getattr(Reading(), name)]
        return ", ".join(f"--{name.replace('_', '-')}" for name in found)


PLAIN = Reading()
"""Without any option."""


class Batch(NamedTuple):
    """Some inputs of a file."""

    beside: Mapping[str, Any]  # columns that are written before the predictions: what tells the inputs apart
    x: Tensor  # (N, ...) as the network takes them
    targets: Any = None  # as a table's file has them; None where it has none


class Source(NamedTuple):
    """A file or folder that is open."""

    batches: Iterator[Batch]
    noun: str  # what its inputs are called: "rows" or "inputs"
    total: int | None  # inputs in all, where it is known or can be guessed
    is_exact: bool  # whether it is known
    notes: Callable[[], list[str]]  # what there is to know of what was read so far


Write = Callable[[Mapping[str, Any], Columns], int]
"""Appends predictions, after the columns beside them, to a file; gives the number of rows written."""


def first_inputs(source: Source, most: int) -> Tensor:
    """The first inputs of a source, (at most `most`, ...)."""
    parts: list[Tensor] = []
    rows = 0
    for batch in source.batches:
        parts.append(batch.x[: most - rows])
        rows += len(parts[-1])
        if rows >= most:
            break
    return torch.cat(parts)
