"""A saved model of either kind, for the commands that look at both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dapcal.cli.common import typer

if TYPE_CHECKING:
    from dapcal.own.model import OwnModel
    from dapcal.tables.model import TableModel

Factory = Annotated[
    str | None, typer.Option("--model", help="For networks of your own: package.module:factory, as in `calibrate`.")
]


def load(path: Path, factory: str | None, device: str) -> TableModel | OwnModel:
    """A table's model loads by itself; a network of one's own needs its code. Both have `inputs` and `subject`."""
    from dapcal import artifact

    if artifact.open(path).about.get("kind") == "model":
        from dapcal.own import model as own_models

        return own_models.load(path, factory, device)
    if factory is not None:
        raise ValueError(f"{path} is a table's model and needs no --model; leave it out")
    from dapcal.tables import model as tables

    return tables.load(path, device)
