"""Checkpoint files of training runs: complete or absent, no pickled code, refused where they are of another run."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dapcal.data import Labelled
from dapcal.files import complete_or_absent

FORMAT = 1


def write(path: Path, marks: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Save the state of a run under the marks that tell it from others."""
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


def check_place(path: Path) -> None:
    """An error before training, not after it, where no checkpoint can be written."""
    if path.is_dir():
        raise ValueError(f"Expected `checkpoint` as a file, got the folder {path}; name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"Cannot write the checkpoint {path} ({error}); name a file in a folder of yours") from error


def described(value: Any) -> str:
    """A setting as text; where an object of the user's own has no text but its address, its class alone."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def of_model(model: nn.Module, start: bool = True) -> str:
    """A fingerprint of a network: its layers, what is fixed in it, and the weights that training starts from.

    Without `start` the latter do not count: an untrained network has other random ones when a script runs again.
    """
    layers = hashlib.sha256(described(model).encode()).hexdigest()
    parameters = [p for p in model.parameters() if start or not p.requires_grad]
    return f"{layers} {fingerprint([*parameters, *model.buffers()])}"


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Of up to 1000 rows spread over each tensor."""
    value = hashlib.sha256()
    for tensor in tensors:
        rows = tensor.detach().reshape(-1, 1) if tensor.ndim < 2 else tensor.detach()
        index = torch.linspace(0, len(rows) - 1, min(len(rows), 1000), dtype=torch.float64).long()
        value.update(rows[index.to(rows.device)].cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return value.hexdigest()


def digest(data: Labelled | DataLoader) -> str:
    """A fingerprint of inputs and targets; a DataLoader is looked at where it has a TensorDataset."""
    if not isinstance(data, DataLoader):
        return fingerprint((data.x, data.y))
    return fingerprint(data.dataset.tensors) if isinstance(data.dataset, TensorDataset) else ""
