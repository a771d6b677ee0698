"""Images decoded once, kept as .npy files that are named after the checksums of their sources."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dapcal.experiments.datasets.files import SHA256, cache_folder, digest, find, mismatch, warn_unwritable
from dapcal.files import complete_or_absent

CONTENTS: dict[str, str] = {
    "cifar10-train": "f3120a8fa253dbdad16aeebfcbcdbe65951c58226061082bf1b61dde3add92d7",
    "cifar10-test": "815bee49b92162b075142619fb16b9562d1186e49d0509d9cf0af8940f739265",
    "cifar100-test": "c4e5d0f8abe8dec50f355ad5e622c815abd93293ca7b5ab9fd56af32924c2061",
    "svhn-test": "22a0770fd7781c7898c789b0ef0a7386468f3ac27b32cbbaecc24f4d28b7152c",
    "omniglot-evaluation": "45d34bb7de744f487b5a77e0f1bb6c0d2c9b14e97130cd906cac85e66c074715",
}
"""SHA-256 of pixels and labels, for data that also come in another wrapping than the files of `SHA256`."""


class Arrays(NamedTuple):
    """Decoded images."""

    x: np.ndarray  # uint8 (N, C, H, W)
    y: np.ndarray  # int64 (N,)

    def checksum(self) -> str:
        """SHA-256 of shape, pixels and labels."""
        running = hashlib.sha256(repr(self.x.shape).encode())
        for array in self:
            running.update(np.ascontiguousarray(array).data)
        return running.hexdigest()


def decoded(name: str, files: tuple[str, ...], decode: Callable[..., Arrays]) -> Arrays:
    """Images of `files`, from the cache where they were decoded before (then mapped into memory, not read).

    Args:
        name: of the data and split, such as "cifar10-test".
        files: sources, as in `SHA256`.
        decode: from the paths of the sources to arrays.
    """
    paths = {file: find(file) for file in files}
    digests = {file: digest(path) for file, path in paths.items()}
    key = hashlib.sha256("".join(digests.values()).encode()).hexdigest()[:16]
    stem = cache_folder() / "decoded" / f"{name}-{key}"
    kept = _read(stem)
    if kept is not None:
        return kept
    changed = [file for file in files if digests[file] != SHA256[file]]
    arrays = _same_contents(name, changed[0], paths, digests, decode) if changed else decode(*paths.values())
    _write(stem, arrays)
    return arrays


def _same_contents(
    name: str, changed: str, paths: dict[str, Path], digests: dict[str, str], decode: Callable[..., Arrays]
) -> Arrays:
    """Images from files with other checksums, if every pixel and label is as it should be."""
    if name not in CONTENTS:
        raise mismatch(changed, paths[changed], digests[changed])
    refusal = mismatch(changed, paths[changed], digests[changed], "or the same pixels and labels")
    try:
        arrays = decode(*paths.values())
    except (
        ValueError,
        OSError,
        SyntaxError,
        LookupError,
        zlib.error,
        zipfile.BadZipFile,
    ) as error:  # what a damaged file may cause
        raise refusal from error
    if arrays.checksum() != CONTENTS[name]:
        raise refusal
    return arrays


def _read(stem: Path) -> Arrays | None:
    try:  # copy-on-write: whoever changes the pixels changes them for itself
        return Arrays(*(np.load(f"{stem}-{part}.npy", mmap_mode="c") for part in Arrays._fields))
    except (OSError, ValueError, EOFError):  # none yet, or damaged: decoded again
        return None


def _write(stem: Path, arrays: Arrays) -> None:
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        for part, array in zip(Arrays._fields, arrays, strict=True):
            with complete_or_absent(f"{stem}-{part}.npy") as path, path.open("wb") as file:
                np.save(file, array)
    except OSError:
        warn_unwritable(cache_folder())
