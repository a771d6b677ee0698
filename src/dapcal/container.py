"""A file of named tensors and a text, sealed by checksums, and read without trust in what it says of its own sizes.

The layout is that of safetensors: the length of the header in eight bytes, the header as JSON, the tensors' bytes one
after the other. A tensor is one contiguous piece that begins at a multiple of its element size, the data begin at a
page, so that all of it can be mapped into memory. The header holds a checksum of every block of `BLOCK` bytes of a
tensor, and one of itself: a block can be checked without the others, and a signature of the header is one of all.

Files of version 1 have one checksum of everything.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

BLOCK = 1 << 22  # bytes under one checksum
TEXT, BLOCKS, SEAL, SIGNATURE = "dapcal", "blocks", "sha256", "signature"  # of the header's metadata
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PAGE = 4096
_AT_ONCE = 1 << 26  # a file up to this size is read in one go
_MOST_HEADER = 100_000_000  # as in safetensors
_MOST_DIMENSIONS, _MOST_ENTRIES = 32, 2**48  # of a tensor; one without entries may still have a long side


class Damaged(ValueError):
    """A file that is not what it should be; in words that complete a sentence."""


class Changed(Damaged):
    """A file whose checksum does not match."""


class Foreign(ValueError):
    """A file of another program's."""


@dataclass(frozen=True, eq=False)
class Content:
    """What a file holds, once `check` has found its checksums to be right.

    Attributes:
        metadata: texts by name, the description among them.
        entries: types, shapes and places of the tensors, as the header has them.
        tensors: by name.
    """

    metadata: dict[str, str]
    entries: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def text(self) -> str:
        """The description."""
        return self.metadata[TEXT]

    @property
    def version(self) -> int:
        """Of the layout."""
        return 2 if BLOCKS in self.metadata else 1

    @property
    def signature(self) -> str | None:
        """As it stands in the file; None in one that is not signed."""
        return self.metadata.get(SIGNATURE)

    @cached_property
    def seal(self) -> bytes:
        """Checksum of everything, which a signature signs."""
        return digest(self.text, self.tensors) if self.version == 1 else _seal(self.entries, self.metadata)

    def check(self) -> None:
        """Raise `Changed` where something is not as it was written."""
        if self.seal.hex() != self.metadata.get(SEAL):
            raise Changed("its checksum does not match")
        if self.version == 1:
            return
        blocks = _parsed(self.metadata[BLOCKS])
        _expect(isinstance(blocks, dict) and set(blocks) == set(self.tensors), "its checksums are of other tensors")
        for name, tensor in self.tensors.items():
            if blocks[name] != _checksums(tensor):
                raise Changed(f"the checksum of {name[:60]!r} does not match")


def write(file: BinaryIO, text: str, tensors: Mapping[str, Tensor], sign: Callable[[bytes], str] | None = None) -> None:
    """Write everything, from first byte to last.

    Args:
        file: open for writing.
        text: any.
        tensors: in main memory.
        sign: makes a signature of a checksum.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), -item[1].nbytes, item[0]))
    entries, blocks, place = {}, {}, 0
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES:
            raise TypeError(f"Cannot store numbers of type {tensor.dtype} ({name}); convert them, e.g. to float32")
        end = place + tensor.nbytes
        entries[name] = {
            "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [place, end]
        }  # fmt: skip
        blocks[name] = _checksums(tensor)
        place = end
    metadata = {TEXT: text, BLOCKS: json.dumps(blocks)}
    seal = _seal(entries, metadata)
    metadata[SEAL] = seal.hex()
    if sign is not None:
        metadata[SIGNATURE] = sign(seal)
    header = json.dumps({"__metadata__": metadata, **entries}).encode()
    header += b" " * (-(8 + len(header)) % (_PAGE if place > BLOCK else 8))
    file.write(struct.pack("<Q", len(header)) + header)
    for _, tensor in ordered:
        for block in _blocks(tensor):
            file.write(block)


def read(path: Path) -> Content:
    """Read a file whose sizes agree with each other; nothing is built that is larger than the file."""
    with path.open("rb") as opened:
        size = path.stat().st_size
        file: BinaryIO = io.BytesIO(opened.read()) if size <= _AT_ONCE else opened
        header, start = _header(file, size)
        metadata = header.pop("__metadata__", {})
        _expect(isinstance(metadata, dict), "its metadata are not a table")
        _expect(all(isinstance(value, str) for value in metadata.values()), "its metadata are not texts")
        places = _places(header, size - start)
        if TEXT not in metadata:
            raise Foreign
        tensors = {name: _tensor(file, start, *place) for name, place in places.items()}
    return Content(metadata, header, tensors)


def digest(text: str, tensors: Mapping[str, Tensor]) -> bytes:
    """The checksum of version 1."""
    found = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for block in _blocks(tensor):
            found.update(block)
    return found.digest()


def _seal(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    sealed = [metadata[TEXT], metadata[BLOCKS], entries]
    return hashlib.sha256(json.dumps(sealed, sort_keys=True).encode()).digest()


def _header(file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """The header, and where the data begin."""
    _expect(size >= 8, "it has fewer than 8 bytes")
    length = struct.unpack("<Q", file.read(8))[0]
    _expect(length <= min(size - 8, _MOST_HEADER), "its header is longer than the file")
    header = _parsed(file.read(length))
    _expect(isinstance(header, dict), "its header is not a table")
    return header, 8 + length


def _parsed(text: str | bytes) -> Any:
    try:
        return parsed(text)
    except ValueError as error:
        raise Damaged(f"its header is not JSON ({error})") from error


def parsed(text: str | bytes) -> Any:
    """JSON without a name twice in one object, numbers that are not numbers, or more levels than Python can follow."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a number")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name occurs twice")
        return found

    try:
        return json.loads(text, parse_constant=refuse, object_pairs_hook=once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _places(entries: dict[str, Any], size: int) -> dict[str, tuple[torch.dtype, tuple[int, ...], int]]:
    """Type, shape and first byte of every tensor; together they fill the data without a gap."""
    found, ends = {}, []
    for name, entry in entries.items():
        fits = isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}
        _expect(fits, f"the entry of {name[:60]!r} is damaged")
        shape, offsets = entry["shape"], entry["data_offsets"]
        whole = all(
            isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
            for values in (shape, offsets)
        )
        _expect(whole and len(offsets) == 2 and len(shape) <= _MOST_DIMENSIONS, f"{name[:60]!r} has no shape")
        _expect(isinstance(entry["dtype"], str) and entry["dtype"] in _DTYPES, f"{name[:60]!r} has no type")
        _expect(math.prod(filter(None, shape)) <= _MOST_ENTRIES, f"{name[:60]!r} has too large a shape")
        dtype = _DTYPES[entry["dtype"]]
        _expect(
            math.prod(shape) * dtype.itemsize == offsets[1] - offsets[0], f"{name[:60]!r} has not the declared size"
        )
        found[name] = dtype, tuple(shape), offsets[0]
        ends.append(offsets)
    place = 0
    for begin, end in sorted(ends):
        _expect(begin == place, "its tensors overlap or leave a gap")
        place = end
    _expect(place == size, f"it has {size} bytes of tensors in place of {place}")
    return found


def _tensor(file: BinaryIO, start: int, dtype: torch.dtype, shape: tuple[int, ...], place: int) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    file.seek(start + place)
    for block in _blocks(tensor):
        _expect(file.readinto(block) == len(block), "it ends too early")  # type: ignore[attr-defined]
    if dtype == torch.bool:
        _expect(bool((tensor.view(torch.uint8) <= 1).all()), "it holds a truth value that is neither 0 nor 1")
    return tensor


def _blocks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a contiguous tensor, in memory, a block at a time."""
    if tensor.numel():
        whole = tensor.reshape(-1).view(torch.uint8).numpy().data
        yield from (whole[start : start + BLOCK] for start in range(0, len(whole), BLOCK))


def _checksums(tensor: Tensor) -> list[str]:
    return [hashlib.sha256(block).hexdigest() for block in _blocks(tensor)]


def _expect(fine: bool, trouble: str) -> None:
    if not fine:
        raise Damaged(trouble)
