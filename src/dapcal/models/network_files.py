"""A network's inputs from an npz file or a folder of images, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dapcal.amounts import amount
from dapcal.models import arrays
from dapcal.models.image_folders import Decoder, image_files
from dapcal.models.model import Batch, Reading, Source

_BATCH = 256  # inputs at a time


def read(path: Path, reading: Reading, example: Tensor, shades: tuple[float, float]) -> Source:
    """Array `x` of an npz file, or all images of a folder.

    Args:
        path: file or folder.
        reading: how.
        example: one input of the network, (1, ...): files must hold such.
        shades: black and white, as held-out inputs have them.
    """
    size = reading.batch_size or _BATCH
    if path.is_dir():
        return _images(path, reading, tuple(example.shape[1:]), shades, size)
    if reading.given("resize", "mean", "std"):
        raise ValueError(f"--resize, --mean and --std are for folders of images, and {path} is none; leave them out")
    return _arrays(path, example, size)


def _arrays(path: Path, example: Tensor, size: int) -> Source:
    found, shape = arrays.array(path, "x"), tuple(example.shape[1:])
    if found.shape[1:] != shape:
        raise ValueError(f"{path}: Expected inputs of shape {shape}, as in training, got {found.shape[1:]}")
    if not example.is_floating_point() and found.dtype.kind == "f":
        raise ValueError(
            f"{path}: Expected token ids in `x` as whole numbers, as in training, got {found.dtype}; save "
            "x.astype('int64') if they have no fractions"
        )
    dtype = example.dtype if example.is_floating_point() else torch.get_default_dtype()

    def batches() -> Iterator[Batch]:
        done = 0
        for values in found.batches(size):
            x = arrays.as_inputs(values, dtype, str(path), done)
            yield Batch({"index": np.arange(done, done + len(x))}, x)
            done += len(x)

    return Source(batches(), "inputs", found.shape[0], True, list)


def _images(folder: Path, reading: Reading, shape: tuple[int, ...], shades: tuple[float, float], size: int) -> Source:
    decode = Decoder(shape, reading.mean or (0.0,), reading.std or (1.0,), reading.resize)
    files = image_files(folder)

    def batches() -> Iterator[Batch]:
        done = 0
        for x in decode.batches(files, size):
            yield Batch({"file": _names(files[done : done + len(x)], folder)}, x)
            done += len(x)

    notes = []
    if not reading.given("mean", "std") and shades != (0.0, 1.0):
        low, high = shades
        notes.append(
            f"pixels are read as 0 to 1, but held-out inputs went from {amount(low, 3)} to {amount(high, 3)}; see "
            "--mean, --std"
        )
    return Source(batches(), "inputs", len(files), True, lambda: notes)


def _names(files: Sequence[Path], folder: Path) -> np.ndarray:
    return np.asarray([path.relative_to(folder).as_posix() for path in files])
