"""Arrays `x` and `y` of npz files, whole or a few rows at a time, compressed or not.

Rules: floating-point inputs take the network's precision; int32 and int64 are token ids and stay whole numbers; bytes
(uint8, such as raw pixels), booleans and other types are refused, as only who trained the network knows how they were
scaled. Targets: whole numbers are classes, fractions are for regression.
"""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from dapcal.data import Labelled, check_inputs

_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError, UnicodeDecodeError, OSError)


def labelled(path: str | Path, dtype: torch.dtype) -> Labelled:
    """Inputs and targets of a file; floating-point inputs in `dtype`."""
    x, y = array(path, "x"), array(path, "y")
    if y.shape[0] != x.shape[0]:
        raise ValueError(f"{path}: Expected as many targets as inputs, got {x.shape[0]} in `x` and {y.shape[0]} in `y`")
    if y.dtype.kind not in "biuf":
        raise ValueError(f"{path}: Expected `y` as numbers, got {y.dtype}; classes are whole numbers from 0")
    inputs, targets = as_inputs(x.read(), dtype, str(path)), y.read()
    if targets.dtype.kind != "f":
        return Labelled(inputs, torch.from_numpy(targets.astype(np.int64)))
    if not np.isfinite(targets).all():
        raise ValueError(f"{path}: Expected finite targets in `y`, got NaN or inf; drop those rows")
    return Labelled(inputs, torch.from_numpy(targets.astype(np.float64)).to(dtype))


def unlabelled(path: str | Path, dtype: torch.dtype) -> Tensor:
    """Inputs alone."""
    return as_inputs(array(path, "x").read(), dtype, str(path))


def as_inputs(values: np.ndarray, dtype: torch.dtype, source: str, first: int = 0) -> Tensor:
    """Inputs (N, ...) as a network takes them; `first` is the number of the first row, counted from 0, for errors."""
    if values.dtype.kind == "f":
        x = torch.from_numpy(values if values.dtype.itemsize <= 8 else values.astype(np.float64)).to(dtype)
    elif values.dtype in (np.int32, np.int64):
        x = torch.from_numpy(values.astype(np.int64))
    else:
        pixels = "save x.astype('float32') / 255 if the model was trained so"
        advice = pixels if values.dtype == np.uint8 else "convert it as in training"
        raise ValueError(
            f"{source}: Expected `x` as floating-point inputs, or int64 token ids, got {values.dtype}; {advice}"
        )
    finite = x.isfinite().flatten(1).all(1) if x.ndim > 1 else x.isfinite()
    if not finite.all():
        row = first + int((~finite).nonzero()[0])
        raise ValueError(
            f"{source}: Expected finite inputs in `x`, got NaN or inf in row {row}; drop or impute such rows"
        )
    try:
        return check_inputs(x, "x")
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


@dataclass(frozen=True)
class Array:
    """An array in an npz file, not yet read."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    fortran: bool

    def read(self) -> np.ndarray:
        """The whole array."""
        with _opened(self.path, self.name) as member:
            _header(member)
            count = int(np.prod(self.shape, dtype=np.int64))
            flat = np.frombuffer(_exactly(member, count * self.dtype.itemsize), self.dtype)
        values = flat.reshape(self.shape, order="F" if self.fortran else "C")
        return np.array(values, self.dtype.newbyteorder("="), order="C")  # a copy, which may be written to

    def batches(self, rows: int) -> Iterator[np.ndarray]:
        """At most `rows` rows at a time; only an array in Fortran order is read as a whole."""
        if self.fortran:
            values = self.read()
            yield from (values[start : start + rows] for start in range(0, len(values), rows))
            return
        one = int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize
        with _opened(self.path, self.name) as member:
            _header(member)
            for start in range(0, self.shape[0], rows):
                shape = (min(rows, self.shape[0] - start), *self.shape[1:])
                values = np.frombuffer(_exactly(member, shape[0] * one), self.dtype).reshape(shape)
                yield values.astype(self.dtype.newbyteorder("="))


def array(path: str | Path, name: str) -> Array:
    """An array by its name: shape and type, from the head of it."""
    path = Path(path)
    with _opened(path, name) as member:
        shape, fortran, dtype = _header(member)
    if dtype.hasobject:
        raise ValueError(f"{path}: array `{name}` holds Python objects, which are not loaded; save numbers")
    if not shape or 0 in shape:
        raise ValueError(f"{path}: Expected at least one row in `{name}`, got shape {shape}")
    return Array(path, name, shape, dtype, fortran)


@contextmanager
def _opened(path: Path, name: str) -> Iterator[IO[bytes]]:
    """The member of that name; what zip and NumPy raise while it is open, as one line that names the file."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name an npz file in it")
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}; check the path")
    try:
        with zipfile.ZipFile(path) as archive:
            names = [member.removesuffix(".npy") for member in archive.namelist()]
            if name not in names:
                held = ", ".join(f"`{other}`" for other in names[:5]) or "nothing"
                raise ValueError(
                    f"{path} has no array `{name}`, it holds {held}; write it with numpy.savez(path, x=x, y=y)"
                )
            with archive.open(f"{name}.npy") as member:
                yield member
    except _DAMAGED as error:
        raise ValueError(
            f"{path} cannot be read as an npz file ({' '.join(str(error).split())}); write it with "
            "numpy.savez(path, x=x, y=y)"
        ) from error


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    try:
        version = np.lib.format.read_magic(member)
        read: Any = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(member)
    except (ValueError, TypeError, SyntaxError, tokenize.TokenError) as error:
        raise zipfile.BadZipFile(str(error)) from error
    return shape, fortran, dtype


def _exactly(member: IO[bytes], size: int) -> bytes:
    data = member.read(size)
    if len(data) != size:
        raise EOFError("an array is shorter than its head says")
    return data
