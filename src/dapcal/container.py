"""A file of named tensors and a text, sealed by checksums, and read without trust in what it says of its own sizes.

The layout is that of safetensors: the length of the header in eight bytes, the header as JSON, the tensors' bytes one
after the other. A tensor is one contiguous piece that begins at a multiple of its element size, the data begin at a
page, so that all of it can be mapped into memory. The header holds a checksum of every block of a tensor
(`dapcal.blocks`), and one of itself: a block can be checked without the others, and a signature of the header is one of
all. So large tensors may stay in the file until they are used (`dapcal.in_file`).

Files of version 1 have one checksum of everything, and are read whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from dapcal import blocks, in_file
from dapcal.blocks import Changed, Damaged

LARGE = 1 << 24  # bytes from which on a tensor may stay in its file
TEXT, BLOCKS, SEAL, SIGNATURE = "dapcal", "blocks", "sha256", "signature"  # of the header's metadata
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PAGE = 4096
_MOST_HEADER = 100_000_000  # as in safetensors
_MOST_DIMENSIONS, _MOST_ENTRIES = 32, 2**48  # of a tensor; one without entries may still have a long side


class Foreign(ValueError):
    """A file of another program's."""


class Place(NamedTuple):
    """Where a tensor is in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # its first byte

    @property
    def nbytes(self) -> int:
        """That it takes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_aligned(self) -> bool:
        """Whether it can be used where it is."""
        return self.begin % self.dtype.itemsize == 0 == blocks.BLOCK % self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Content:
    """What a file holds, once `check` has found its checksums to be right.

    Attributes:
        metadata: texts by name, the description among them.
        entries: types, shapes and places of the tensors, as the header has them.
        tensors: by name; those that stay in the file check themselves when they are used.
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
        """Raise `Changed` where something is not as it was written, but for what stays in the file."""
        if self.seal.hex() != self.metadata.get(SEAL):
            raise Changed("its checksum does not match")
        if self.version == 1:
            return
        written = _checksums(self.metadata)
        _expect(set(written) == set(self.tensors), "its checksums are of other tensors")
        for name, tensor in self.tensors.items():
            if not isinstance(tensor, in_file.InFile) and written[name] != blocks.checksums(tensor):
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
    entries, checksums, place = {}, {}, 0
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES:
            raise TypeError(f"Cannot store numbers of type {tensor.dtype} ({name}); convert them, e.g. to float32")
        end = place + tensor.nbytes
        entries[name] = {
            "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [place, end]
        }  # fmt: skip
        checksums[name] = blocks.checksums(tensor)
        place = end
    metadata = {TEXT: text, BLOCKS: json.dumps(checksums)}
    seal = _seal(entries, metadata)
    metadata[SEAL] = seal.hex()
    if sign is not None:
        metadata[SIGNATURE] = sign(seal)
    header = json.dumps({"__metadata__": metadata, **entries}).encode()
    header += b" " * (-(8 + len(header)) % (_PAGE if place > blocks.BLOCK else 8))
    file.write(struct.pack("<Q", len(header)) + header)
    for _, tensor in ordered:
        for block in blocks.blocks(tensor):
            file.write(block)


def read(path: Path, may_stay: Callable[[str, Collection[str]], Collection[str]] = lambda *_: ()) -> Content:
    """Read a file whose sizes agree with each other; nothing is built that is larger than the file.

    Args:
        path: the file.
        may_stay: says from the description and the names of large tensors which of these may stay in the file.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        header, start = _header(file, size)
        metadata = header.pop("__metadata__", {})
        _expect(isinstance(metadata, dict), "its metadata are not a table")
        _expect(all(isinstance(value, str) for value in metadata.values()), "its metadata are not texts")
        places = _places(header, start, size)
        if TEXT not in metadata:
            raise Foreign
        tensors = _staying(path, file, places, metadata, may_stay)
        tensors |= {name: _tensor(file, *place) for name, place in places.items() if name not in tensors}
    return Content(metadata, header, {name: tensors[name] for name in places})


def digest(text: str, tensors: Mapping[str, Tensor]) -> bytes:
    """The checksum of version 1."""
    found = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for block in blocks.blocks(tensor):
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


def _places(entries: dict[str, Any], start: int, size: int) -> dict[str, Place]:
    """Where the tensors are; together they fill the file from `start` on without a gap."""
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
        found[name] = Place(dtype, tuple(shape), start + offsets[0])
        ends.append(offsets)
    place = 0
    for begin, end in sorted(ends):
        _expect(begin == place, "its tensors overlap or leave a gap")
        place = end
    _expect(place == size - start, f"it has {size - start} bytes of tensors in place of {place}")
    return found


def _staying(
    path: Path,
    file: BinaryIO,
    places: Mapping[str, Place],
    metadata: Mapping[str, str],
    may_stay: Callable[[str, Collection[str]], Collection[str]],
) -> dict[str, Tensor]:
    """The tensors that stay in the file: large ones, each of whose blocks can be checked by itself."""
    large = {name: place for name, place in places.items() if place.nbytes >= max(1, LARGE) and place.is_aligned}
    if not large or BLOCKS not in metadata or not in_file.POSSIBLE:
        return {}
    written, staying = _checksums(metadata), may_stay(metadata[TEXT], large)
    whole = in_file.MappedFile(path, file)
    return {
        name: whole.tensor(name, *large[name], written[name])
        for name in staying
        if len(written.get(name, ())) == -(-large[name].nbytes // blocks.BLOCK)
    }


def _checksums(metadata: Mapping[str, str]) -> dict[str, list[str]]:
    """Of the blocks of every tensor."""
    found = _parsed(metadata[BLOCKS])
    fits = isinstance(found, dict) and all(isinstance(sums, list) for sums in found.values())
    _expect(fits, "its checksums are not lists")
    return dict(found)


def _tensor(file: BinaryIO, dtype: torch.dtype, shape: tuple[int, ...], begin: int) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    file.seek(begin)
    for block in blocks.blocks(tensor):
        _expect(file.readinto(block) == len(block), "it ends too early")  # type: ignore[attr-defined]
    blocks.check_truth(tensor)
    return tensor


def _expect(fine: bool, trouble: str) -> None:
    if not fine:
        raise Damaged(trouble)
