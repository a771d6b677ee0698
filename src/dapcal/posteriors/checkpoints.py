"""Checkpoint files of training runs: complete or absent, no pickled code, refused where they are of another run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from dapcal.data import Labelled
from dapcal.files import complete_or_absent

FORMAT = 1


def write(path: Path, marks: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Save the state of a run under the marks that tell it from others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with complete_or_absent(path) as part:
        torch.save({"format": FORMAT, "marks": dict(marks), "run": dict(state)}, part)


def read(path: Path, marks: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a run; an error names what is different from the run that asks."""
    try:
        saved = torch.load(path, weights_only=True, map_location="cpu")
        if saved["format"] != FORMAT:
            raise ValueError(f"format {saved['format']}")
        found, state = saved["marks"], saved["run"]
    except Exception as error:
        raise ValueError(
            f"{path} is no checkpoint that this dapcal reads ({type(error).__name__}); remove it to start anew"
        ) from error
    other = [name for name in marks if found.get(name) != marks[name]]
    if other:
        raise ValueError(
            f"{path} is the checkpoint of another run (other {', '.join(other)}); remove it to start anew, or give the "
            "same settings to go on"
        )
    return dict(state)


def digest(train: Labelled | DataLoader) -> str:
    """A fingerprint of up to 1000 rows spread over the data; the batches of a DataLoader are not looked at."""
    if isinstance(train, DataLoader):
        return ""
    rows = torch.linspace(0, len(train.x) - 1, min(len(train.x), 1000)).long()
    value = hashlib.sha256()
    for part in (train.x, train.y):
        value.update(part[rows.to(part.device)].cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return value.hexdigest()
