"""A saved model of either kind, as the commands that look at both see it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch
from torch import Tensor

from dapcal.cli.common import typer

if TYPE_CHECKING:
    from dapcal.report.subject import Subject

Factory = Annotated[
    str | None, typer.Option("--model", help="For networks of your own: package.module:factory, as in `calibrate`.")
]


class Loaded(NamedTuple):
    """What reports and explanations need of a model."""

    inputs: Callable[[Path, int], Tensor]  # a file's first inputs, at most so many
    subject: Callable[[str, Tensor | None, str], Subject]  # of a title, new inputs and their name


def load(path: Path, factory: str | None, device: str) -> Loaded:
    """Tables load by themselves; a network of one's own needs its code."""
    from dapcal import artifact

    kind = artifact.notes_of(path).about.get("kind")
    if kind == "model":
        from dapcal.own import model as own_models

        own = own_models.load(path, factory, device)
        return Loaded(own.inputs, own.subject)
    if factory is not None:
        raise ValueError(f"{path} is a table's model and needs no --model; leave it out")
    from dapcal.tables import model as tables

    return _of_table(tables.load(path, device))


def _of_table(model: object) -> Loaded:
    from dapcal.tables import stream
    from dapcal.tables.model import TableModel

    assert isinstance(model, TableModel)

    def inputs(data: Path, most: int) -> Tensor:
        parts: list[Tensor] = []
        rows = 0
        for batch in stream(data, model.encoder.expected):
            parts.append(model.encoder(batch, rows + 1).x[: most - rows])
            rows += len(parts[-1])
            if rows >= most:
                break
        if not parts:
            raise ValueError(f"{data} has a header and no rows; there is nothing to look at")
        return torch.cat(parts).to(model.train.x.device)

    return Loaded(inputs, model.subject)
