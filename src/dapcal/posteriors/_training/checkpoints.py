"""Checkpoint files of training runs: complete or absent, sealed by a checksum, no pickled code.

A checkpoint that is damaged or of another run is refused by name: it never goes on to another result than the run that
wrote it would have had. Whoever wants to start over removes the file.
"""

from __future__ import annotations

import hashlib
import random
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from dapcal.data import Labelled
from dapcal.files import complete_or_absent, replaceable
from dapcal.inputs import targets_in
from dapcal.records import DapcalWarning

FORMAT = 2
_SEAL = b"\ndapcal sha256 "  # before the checksum of all that comes before it; zip files may end in more than they are
_SEALED = len(_SEAL) + 64
_CHUNK_BYTES = 1 << 24


def write(path: Path, marks: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Save the state of a run under the marks that tell it from others."""
    try:
        with complete_or_absent(path) as part, part.open("w+b") as file:
            torch.save({"format": FORMAT, "marks": dict(marks), "run": dict(state)}, file)
            file.seek(0)
            file.write(_SEAL + hashlib.file_digest(file, "sha256").hexdigest().encode())
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__  # torch has words of its own for a full disk
        if not isinstance(cause, OSError):
            raise
        raise OSError(
            f"Could not write the checkpoint {path}: {cause.strerror or cause}; the last one is as it was, and the "
            "same call goes on from there. Make room, or name another place"
        ) from error


def read(path: Path, marks: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a run; an error names what is different from the run that asks."""
    with path.open("rb") as file, refused_if_damaged(path):
        content = max(path.stat().st_size - _SEALED, 0)
        found = hashlib.sha256()
        for start in range(0, content, _CHUNK_BYTES):
            found.update(file.read(min(_CHUNK_BYTES, content - start)))
        if file.read() != _SEAL + found.hexdigest().encode():
            raise ValueError("its checksum does not match")
        file.seek(0)
        saved = torch.load(file, weights_only=True, map_location="cpu")
        if saved["format"] != FORMAT:
            raise ValueError(f"format {saved['format']}")
        own, state = dict(saved["marks"]), dict(saved["run"])
        other = [name for name in marks if own.get(name) != marks[name]]
    if other:
        raise ValueError(
            f"{path} is the checkpoint of another run (other {', '.join(other)}); remove it to start anew, or give the "
            "same settings to go on"
        )
    return state


@contextmanager
def refused_if_damaged(path: Path) -> Iterator[None]:
    """Whatever goes wrong with the content of a checkpoint, as one sentence that names it and the choice there is."""
    try:
        yield
    except Exception as error:
        told = " ".join(str(error).split())[:100]
        raise ValueError(
            f"{path} is not a checkpoint that this dapcal reads: damaged, incomplete or of another version "
            f"({type(error).__name__}: {told}); remove it to start over, or put an undamaged copy in its place"
        ) from error


def check_place(path: Path) -> None:
    """An error before training, not after it, where no checkpoint can be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replaceable(path)
    except OSError as error:
        raise ValueError(f"Cannot write the checkpoint {path} ({error}); name a file in a folder of yours") from error


def described(value: Any) -> str:
    """A setting as text; where an object of the user's own has no text but its address, its class alone."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def structure(value: Any) -> str:
    """Names, shapes and types of what is nested in a state: the same for all states of which no part is missing."""
    if isinstance(value, Tensor):
        return f"{value.dtype}{tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name!r}: {structure(part)}' for name, part in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(structure, value))}]"
    return type(value).__name__


def of_model(model: nn.Module, start: bool = True) -> str:
    """A fingerprint of a network: its layers, what is fixed in it, and the weights that training starts from.

    Without `start` the latter do not count: an untrained network has other random ones when a script runs again.
    """
    layers = hashlib.sha256(described(model).encode()).hexdigest()
    parameters = [p for p in model.parameters() if start or not p.requires_grad]
    return f"{layers} {fingerprint([*parameters, *model.buffers()])}"


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Of every number in every tensor, a chunk at a time."""
    value = hashlib.sha256()
    for tensor in tensors:
        _add(value, tensor)
    return value.hexdigest()


def digest(data: Labelled | DataLoader) -> str:
    """A fingerprint of all inputs and targets.

    A DataLoader's data set is read once from its first pair to its last, without the loader's order and workers. Inputs
    that come out differently when they are read again (augmentation) do not count, their targets do.
    """
    if not isinstance(data, DataLoader):
        return fingerprint((data.x, data.y))
    order = [getattr(data.sampler, name, None) for name in ("indices", "weights")]
    drawn = f"{type(data.sampler).__name__} {data.batch_size} {data.drop_last} " + fingerprint(
        torch.as_tensor(part) for part in order if part is not None
    )
    if isinstance(data.dataset, TensorDataset):
        return f"{drawn} {fingerprint(data.dataset.tensors)}"
    if isinstance(data.dataset, IterableDataset):
        warnings.warn(
            "A checkpoint cannot tell one IterableDataset from another: going on with other data gives another result. "
            "Use a Dataset with __getitem__, or take care that the data are the same",
            DapcalWarning,
            stacklevel=2,
        )
        return drawn
    return f"{drawn} {_digest_of_pairs(data.dataset)}"


def _digest_of_pairs(data: Dataset) -> str:
    count = len(data)  # type: ignore[arg-type]

    def of(rows: int, inputs: bool) -> str:
        value = hashlib.sha256()
        with _same_randomness():
            for index in range(rows):
                item = data[index]
                _add(value, item if inputs else targets_in(item) if isinstance(item, Mapping) else item[-1])
        return value.hexdigest()

    few = min(count, 8)
    return of(count, inputs=of(few, inputs=True) == of(few, inputs=True))


@contextmanager
def _same_randomness() -> Iterator[None]:
    """The global generators begin in the same place every time, and are given back as they were."""
    python, arrays = random.getstate(), numpy.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            random.seed(0)
            numpy.random.seed(0)  # noqa: NPY002
            torch.random.default_generator.manual_seed(0)
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)  # noqa: NPY002


def _add(value: Any, part: Any) -> None:
    """Add whatever a data set may hold: tensors, arrays, images, numbers, nested or not."""
    if isinstance(part, Tensor):
        value.update(structure(part).encode())
        flat = part.detach().reshape(-1)
        for chunk in flat.split(max(_CHUNK_BYTES // flat.element_size(), 1)):
            value.update(chunk.cpu().contiguous().view(torch.uint8).numpy().data)
    elif isinstance(part, Mapping):
        _add(value, list(part.items()))
    elif isinstance(part, list | tuple):
        for one in part:
            _add(value, one)
    elif hasattr(part, "__array__") or hasattr(part, "__array_interface__"):
        array = numpy.ascontiguousarray(part)
        value.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    else:
        value.update(described(part).encode())
