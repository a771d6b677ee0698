"""Rows that come batch by batch and end as one tensor: in memory while they are few, else in a file that it maps.

The file has no name (it is gone when nobody holds the tensor any more, or the process ends, however it ends) and lies
in the folder for temporary files, `TMPDIR`. Its pages are the system's to drop and to read again: they take no memory
that others could not have. What is made of the rows of a mapped tensor goes to such a file likewise.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from dapcal.files import scratch

IN_MEMORY = 2**24  # bytes of rows that are kept in memory
BLOCK = 4096  # rows of a mapped tensor that are looked at together
_GIVEN_BACK = 2**27  # bytes written to a file, after which memory is given back
_LOOKED_AT = 2**20  # numbers that are checked together: their copies are 4 MiB


class Rows:
    """Batches (n, ...) of one dtype, or (S, n, ...) joined along `dim` 1, in the order in which they came.

    Args:
        dim: along which batches are joined.
        largest: bytes that stay in memory; more go to a file, which tensors on a device do not.
        expected: rows in all, where that is known: a disk without room for them is told at once.
    """

    def __init__(self, dim: int = 0, largest: float | None = None, expected: int | None = None) -> None:
        self.dim = dim
        self.largest = IN_MEMORY if largest is None else largest
        self.expected = expected
        self.count = 0  # rows
        self._shapes: list[torch.Size] = []
        self._kept: list[Tensor] = []
        self._bytes = 0
        self._file: IO[bytes] | None = None
        self._dtype = torch.float32
        self._given_back = 0  # bytes written since memory was given back

    def __len__(self) -> int:
        """Number of batches."""
        return len(self._shapes)

    def append(self, batch: Tensor) -> None:
        """Take one more batch, of which nothing is kept once rows are in a file."""
        if batch.ndim <= self.dim:
            raise ValueError(f"Expected batches of rows (n, ...), got shape {tuple(batch.shape)}; give each a row")
        rows = batch.movedim(self.dim, 0)
        if self._file is not None and rows.dtype != self._dtype:
            raise ValueError(f"Expected batches of one dtype, got {self._dtype} and {rows.dtype}; convert them")
        self._shapes.append(rows.shape)
        self._bytes += rows.numel() * rows.element_size()
        self.count += len(rows)
        if self._file is not None:
            self._write(rows)
            return
        self._kept.append(batch)
        in_main = all(one.device.type == "cpu" for one in (self._kept[0], batch))
        if self._bytes > self.largest and in_main and len({one.dtype for one in self._kept}) == 1:
            self._check_room()
            self._file, self._dtype = scratch(), rows.dtype
            for one in self._kept:
                self._write(one.movedim(self.dim, 0))
            self._kept.clear()

    @cached_property
    def batches(self) -> list[Tensor]:
        """All batches, each of its own shape; none can be added after this."""
        if self._file is None:
            return self._kept
        parts = self._flat.split([shape.numel() for shape in self._shapes])
        return [part.view(shape).movedim(0, self.dim) for part, shape in zip(parts, self._shapes, strict=True)]

    @cached_property
    def joined(self) -> Tensor:
        """All rows in one tensor; none can be added after this."""
        if self._file is None:
            return torch.cat(self._kept, self.dim)
        shape = self._shapes[0][1:]
        if any(other[1:] != shape for other in self._shapes):
            raise ValueError(f"Expected rows of one shape, got {tuple(shape)} and others; pad them")
        return self._flat.view(self.count, *shape).movedim(0, self.dim)

    @cached_property
    def _flat(self) -> Tensor:
        """The file as one flat tensor."""
        assert self._file is not None
        self._file.flush()
        path = Path(f"/dev/fd/{self._file.fileno()}" if os.name == "posix" else self._file.name)
        flat = torch.from_file(str(path), shared=True, size=self._bytes // self._dtype.itemsize, dtype=self._dtype)
        self._file.close()
        if os.name != "posix":
            with suppress(OSError):  # Windows keeps a file that is mapped; its own clean-up has it later
                path.unlink()
        return flat

    def _write(self, rows: Tensor) -> None:
        assert self._file is not None
        self._given_back += rows.numel() * rows.element_size()
        if self._given_back > _GIVEN_BACK:
            self._given_back = 0
            give_back()
        try:
            self._file.write(rows.detach().contiguous().flatten().view(torch.uint8).numpy().data)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise _no_room(f"more than {self._bytes / 1e9:.1f}") from error

    def _check_room(self) -> None:
        needed = self._bytes / max(self.count, 1) * (self.expected or 0)
        if needed > shutil.disk_usage(tempfile.gettempdir()).free:
            raise _no_room(f"{needed / 1e9:.1f}")


def give_back() -> None:
    """Let the system have what was freed, where the C library keeps it (glibc).

    A hole that a tensor leaves is some bytes too small for the next one of its size, which has to be aligned, so that
    batch after batch could take new memory: five gigabytes for two of images were seen, one time in two.
    """
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


@cache
def _c_library() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def _no_room(gigabytes: str) -> OSError:
    return OSError(
        f"Expected room for {gigabytes} GB of rows in {tempfile.gettempdir()}, where they lie while they are looked "
        "at; set TMPDIR to a folder with more of it, or pass fewer"
    )


def is_mapped(x: Tensor) -> bool:
    """Whether a tensor's rows are those of a file."""
    return x.device.type == "cpu" and x.untyped_storage().filename is not None


def rows_like(x: Tensor, dim: int = 0) -> Rows:
    """For what is made of inputs x: a file where many of them are in one, else memory."""
    return Rows(dim, largest_like(x))


def largest_like(*made_of: Tensor) -> float:
    """Bytes that stay in memory of what is made of these inputs: all, unless some of them are in a file."""
    return IN_MEMORY if any(map(is_mapped, made_of)) else math.inf


def joined(batches: Iterable[Tensor], largest: float | None = None) -> Tensor:
    """Batches in one tensor, in a file where they take more than `largest` bytes."""
    rows = Rows(largest=largest)
    for batch in batches:
        rows.append(batch)
    return rows.joined


def in_blocks(change: Callable[[Tensor], Tensor], x: Tensor, dim: int = 0) -> Tensor:
    """change(x), which looks at every row (along `dim`) alone and gives rows: block by block where x is mapped."""
    if not is_mapped(x):
        return change(x)
    return joined(map(change, x.split(BLOCK, dim)))


def taken(x: Tensor, index: Tensor) -> Tensor:
    """The rows at `index`, in a file where x is in one and they are many."""
    return joined(x[part] for part in index.split(BLOCK)) if is_mapped(x) else x[index]


def finite_rows(x: Tensor) -> Tensor:
    """Which rows hold neither NaN nor inf, (N,); memory: copies of a few rows."""
    found = torch.empty(len(x), dtype=torch.bool, device=x.device)  # a list of parts would lie in what is freed
    step = max(1, _LOOKED_AT // max(1, x[:1].numel()))
    for own, block in zip(found.split(step), x.split(step), strict=True):
        own.copy_(_finite_rows(block.flatten(1)))
    return found


def _finite_rows(x: Tensor) -> Tensor:
    """A finite sum is one of finite numbers; another may have been too large, and is looked at again."""
    fine = x.sum(1).isfinite()
    return fine if bool(fine.all()) else x.isfinite().all(1)
