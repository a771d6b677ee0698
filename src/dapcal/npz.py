"""Arrays of npz files, whole or a few rows at a time, compressed or not; nothing is unpickled."""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, RuntimeError, UnicodeDecodeError, OSError)


def names_of(path: str | Path) -> tuple[str, ...]:
    """What the arrays in a file are called, in their order."""
    with _archive(Path(path)) as archive:
        members = archive.namelist()
    for member in members:
        if not member.endswith(".npy"):
            raise ValueError(f"{path}: `{member}` is not an array; write the file with numpy.savez")
    return tuple(member.removesuffix(".npy") for member in members)


def array(path: str | Path, name: str) -> Array:
    """An array by its name: shape and type, from the head of it."""
    path = Path(path)
    with _archive(path) as archive, _opened(path, archive, name) as member:
        shape, fortran, dtype = _header(member)
        held = archive.getinfo(f"{name}.npy").file_size - member.tell()
    if dtype.hasobject:
        raise ValueError(f"{path}: array `{name}` holds Python objects, which are not loaded; save numbers or texts")
    if any(type(length) is not int or length < 0 for length in shape) or math.prod(shape) * dtype.itemsize != held:
        raise ValueError(
            f"{path}: array `{name}` is said to be {_told(shape)} of {dtype}, and holds {held} bytes; write it again, "
            "with numpy.savez"
        )
    return Array(path, name, shape, dtype, fortran)


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
        with _archive(self.path) as archive, _opened(self.path, archive, self.name) as member:
            _header(member)
            values = self._values(member, self.shape, "F" if self.fortran else "C")
        return np.array(values, self.dtype.newbyteorder("="), order="C")  # a copy, which may be written to

    def batches(self, rows: int) -> Iterator[np.ndarray]:
        """At most `rows` rows at a time; only an array in Fortran order is read as a whole."""
        if self.fortran:
            values = self.read()
            yield from (values[start : start + rows] for start in range(0, len(values), rows))
            return
        with _archive(self.path) as archive, _opened(self.path, archive, self.name) as member:
            _header(member)
            for start in range(0, self.shape[0], rows):
                shape = (min(rows, self.shape[0] - start), *self.shape[1:])
                yield self._values(member, shape, "C").astype(self.dtype.newbyteorder("="))

    def _values(self, member: IO[bytes], shape: tuple[int, ...], order: Any) -> np.ndarray:
        size = math.prod(shape) * self.dtype.itemsize
        if not size:  # no rows, or texts of no characters
            return np.zeros(shape, self.dtype)
        return np.frombuffer(_exactly(member, size), self.dtype).reshape(shape, order=order)


@contextmanager
def _opened(path: Path, archive: zipfile.ZipFile, name: str) -> Iterator[IO[bytes]]:
    """The member of that name."""
    names = [member.removesuffix(".npy") for member in archive.namelist()]
    if name not in names:
        held = ", ".join(f"`{other[:60]}`" for other in names[:5]) or "nothing"
        raise ValueError(f"{path} has no array `{name}`, it holds {held}; write it with numpy.savez(path, x=x, y=y)")
    with archive.open(f"{name}.npy") as member:
        yield member


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """The file; what zip and NumPy raise while it is open, as one line that names it."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name an npz file in it")
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}; check the path")
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except _DAMAGED as error:
        told = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} cannot be read as an npz file, it is damaged or incomplete ({told}); "
            "write it again, with numpy.savez(path, x=x, y=y)"
        ) from error


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    try:
        version = np.lib.format.read_magic(member)
        read: Any = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(member)
    except (ValueError, TypeError, SyntaxError, tokenize.TokenError) as error:
        raise zipfile.BadZipFile(str(error)) from error
    return shape, fortran, dtype


def _told(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))[:100] or "one number"


def _exactly(member: IO[bytes], size: int) -> bytes:
    data = member.read(size)
    if len(data) != size:
        raise EOFError("an array is shorter than its head says")
    return data
