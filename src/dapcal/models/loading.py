"""A saved model of any kind, from one look at its file."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from dapcal import artifact
from dapcal.models.model import NETWORK, TABLE, TEXT, Model


def load(
    path: str | Path,
    factory: nn.Module | str | None = None,
    device: str = "cpu",
    key: str | Path | None = None,
    *,
    whole: bool = False,
) -> Model:
    """Read what `dapcal fit`, `dapcal calibrate` or `Model.save` wrote.

    Args:
        path: the file.
        factory: of a network's model, a network whose weights do not matter, or the name of what makes one
            (package.module:factory). The name in the file is not used, as importing code that a file names would let
            the file choose what runs.
        device: where predictions run.
        key: PEM file of a public key; a file that its owner has not signed is refused.
        whole: check also what stays in the file until it is used, as who cannot stop when a block is damaged wants to.
    """
    stored = artifact.open(path, key)
    if whole:
        stored.check()
    kind = stored.about.get("kind")
    if kind == NETWORK:
        from dapcal.models import network

        return network.restored(stored, factory, device)
    if kind not in (TABLE, TEXT):
        raise ValueError(
            f"{path} was not made by `dapcal fit` or `dapcal calibrate`; load it in Python with "
            "dapcal.load(path, model)"
        )
    if factory is not None:
        what = "a model of texts" if kind == TEXT else "a table's model"
        raise ValueError(f"{path} is {what} and needs no --model; leave it out")
    if kind == TEXT:
        from dapcal.models import text

        return text.restored(stored, device)
    from dapcal.models import table

    return table.restored(stored, device)
