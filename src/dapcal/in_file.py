"""Tensors that stay in their file: mapped into memory, each block checked before its first use in a process.

Nothing is read when such a tensor is made, and processes that have mapped the same file share its pages. `InFile` has
no memory of its own: whatever asks torch for its numbers gets them from the file, once the blocks under them have been
found to be as they were written. A block that is not raises `BlockDamaged`, every time that it is asked for.

Saving replaces a file by a new one, and the old one lives on for who has mapped it. Writing into a file that is in use
shows in its size or time, which are looked at before every use: blocks are then checked again. Making it shorter in the
very moment in which it is read ends the process (SIGBUS), as with every map.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

import torch
from torch import Tensor

from dapcal import blocks

POSSIBLE = sys.platform != "win32"  # where a file that is mapped cannot be replaced
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # lets a map be larger than memory and swap together


class BlockDamaged(ValueError):
    """A file that is in use is not as it was written, as a whole sentence; what was asked for is not to blame."""


class MappedFile:
    """A file in memory, for as long as a tensor of it is used."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._place = path, path.absolute()
        self._opened = os.fstat(file.fileno())
        # private: what is written to a tensor does not reach the file
        self._memory = mmap.mmap(file.fileno(), self._opened.st_size, flags=mmap.MAP_PRIVATE | _NO_RESERVE)

    def tensor(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], place: int, checksums: list[str]) -> InFile:
        """The numbers from byte `place` on; a checksum for every block of them."""
        flat = torch.frombuffer(self._memory, dtype=dtype, count=math.prod(shape), offset=place)
        return InFile(flat.view(shape), _Blocks(self, name, flat, checksums))

    def time(self) -> int:
        """When the file was last written to; an error where it is longer or shorter than it was."""
        opened = self._opened
        try:
            now = self._place.stat()
        except OSError:  # it was removed, and what is mapped lives on
            return opened.st_mtime_ns
        if not os.path.samestat(now, opened):  # and so where another file is in its place
            return opened.st_mtime_ns
        if now.st_size != opened.st_size:
            raise BlockDamaged(
                f"{self.path} has {now.st_size} bytes in place of {opened.st_size}: it was written to while it was in "
                "use; load it again, and replace files by renaming, as saving does"
            )
        return now.st_mtime_ns


class InFile(Tensor):
    """A tensor in a file, or some of its rows, which checks what it hands out."""

    _plain: Tensor  # contiguous, unchecked
    _blocks: _Blocks  # of the whole tensor

    @staticmethod
    def __new__(cls, plain: Tensor, blocks: _Blocks) -> InFile:
        """Without memory of its own."""
        made: InFile = Tensor._make_wrapper_subclass(
            cls, plain.shape, strides=plain.stride(), dtype=plain.dtype, device=plain.device
        )
        made._plain, made._blocks = plain, blocks
        return made

    def checked(self) -> Tensor:
        """The numbers as a plain tensor over the file's memory."""
        begin = int(self._plain.storage_offset())
        self._blocks.check(lambda: self._blocks.between(begin, begin + self._plain.numel()))
        return self._plain

    def __getitem__(self, index: Any) -> Tensor:
        """A slice of rows stays in the file; for single rows the blocks under them alone are checked."""
        if isinstance(index, slice) and index.step in (None, 1):
            return InFile(self._plain[index], self._blocks)
        rows = torch.tensor(index) if type(index) is int else index
        if isinstance(rows, Tensor) and rows.dtype == torch.int64:
            self._blocks.check(lambda: self._under(rows))
            return self._plain[rows]
        return self.checked()[index]

    def split(self, split_size: Any, dim: int = 0) -> tuple[Tensor, ...]:
        """Parts of the rows stay in the file."""
        if dim != 0:
            return self.checked().split(split_size, dim)
        return tuple(InFile(part, self._blocks) for part in self._plain.split(split_size))

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Itself where there is nothing to convert or to move."""
        args, kwargs = _with_plain(args, _unread), _with_plain(kwargs, _unread)
        few = self._plain.flatten()[:0]
        return self if few.to(*args, **kwargs) is few else self.checked().to(*args, **kwargs)

    def detach(self) -> Tensor:
        """Itself: it has no gradient."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> InFile:
        """Itself: the file is one."""
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"InFile({tuple(self.shape)}, {self.dtype}, {self._blocks.name!r} in {self._blocks.file.path})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What Python code asks for."""
        kwargs = kwargs or {}
        if func in _ABOUT:
            return func(args[0]._plain, *args[1:], **kwargs)
        is_other = func is Tensor.to and not isinstance(args[0], InFile)  # which becomes like this one
        read = _unread if is_other else InFile.checked
        return func(*_with_plain(args, read), **_with_plain(kwargs, read))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What other code asks for, which finds no memory here."""
        return func(*_with_plain(args, InFile.checked), **_with_plain(kwargs or {}, InFile.checked))

    def _under(self, rows: Tensor) -> Iterable[int]:
        """The blocks under some rows."""
        width, step = self._plain[0].numel(), self._blocks.step
        first = (rows.reshape(-1, 1) % len(self)) * width + self._plain.storage_offset()
        within = torch.tensor([*range(0, width, step), width - 1])  # at least one number in every block
        found: list[int] = ((first + within) // step).unique().tolist()
        return found


def checked(tensor: Tensor) -> Tensor:
    """The numbers of any tensor: of one that stays in a file, all of them found to be as they were written."""
    return tensor.checked() if isinstance(tensor, InFile) else tensor


def _unread(tensor: InFile) -> Tensor:
    return tensor._plain


def _with_plain(value: Any, read: Callable[[InFile], Tensor]) -> Any:
    """An argument of torch, with plain tensors in it."""
    if isinstance(value, InFile):
        return read(value)
    if type(value) in (tuple, list):
        return type(value)(_with_plain(part, read) for part in value)
    return {name: _with_plain(part, read) for name, part in value.items()} if type(value) is dict else value


_ABOUT = {
    *(getattr(Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "is_cuda", "requires_grad",
    )),
    Tensor.__len__, Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous,
}  # fmt: skip
"""What a tensor says of itself without its numbers."""


class _Blocks:
    """The blocks of one tensor in a file, each checked once in this process, by the thread that comes first."""

    def __init__(self, file: MappedFile, name: str, flat: Tensor, checksums: Sequence[str]) -> None:
        self.file, self.name = file, name
        self.step = blocks.BLOCK // flat.element_size()  # numbers in a block
        self._flat, self._checksums = flat, checksums
        self._whole: set[int] = set()  # blocks that were found to be so
        self._time = file.time()
        self._lock = Lock()

    def between(self, begin: int, end: int) -> range:
        """The blocks under the numbers from `begin` to before `end`."""
        return range(begin // self.step, -(-end // self.step))

    def check(self, wanted: Callable[[], Iterable[int]]) -> None:
        """Raise `BlockDamaged` where one of these is not as it was written."""
        if self.file.time() == self._time and len(self._whole) == len(self._checksums):
            return
        numbers = wanted()
        if self.file.time() == self._time and self._whole.issuperset(numbers):
            return
        with self._lock:
            now = self.file.time()
            if now != self._time:
                self._whole.clear()
                self._time = now
            missing = [number for number in numbers if number not in self._whole]
            with ThreadPoolExecutor(max(1, min(len(missing), torch.get_num_threads()))) as pool:
                for number, found in zip(missing, pool.map(self._checksum, missing), strict=True):
                    self._check(number, found)
                    self._whole.add(number)

    def _part(self, number: int) -> Tensor:
        return self._flat[number * self.step : (number + 1) * self.step]

    def _checksum(self, number: int) -> str:
        (block,) = blocks.blocks(self._part(number))
        return blocks.checksum(block)

    def _check(self, number: int, found: str) -> None:
        place = f"block {number + 1} of {len(self._checksums)} of {self.name[:100]!r}"
        if found != self._checksums[number]:
            raise BlockDamaged(
                f"{self.file.path} was changed after it was saved (the checksum of {place} does not match); save it "
                "again"
            )
        try:
            blocks.check_truth(self._part(number))
        except blocks.Damaged as error:
            raise BlockDamaged(f"{self.file.path} is damaged ({error}, in {place}); save it again") from None
        if not blocks.all_finite(self._part(number)):
            raise BlockDamaged(f"{self.file.path} holds NaN or inf in {place}; calibrate again")
