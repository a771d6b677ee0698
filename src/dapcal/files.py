"""Files that are either complete or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MARK = ".part"


@contextmanager
def complete_or_absent(path: str | Path) -> Iterator[Path]:
    """A temporary file beside `path` to write into; it takes its place when the block ends without an error."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}{_MARK}")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, complete or not at all."""
    with complete_or_absent(path) as part:
        part.write_text(text, encoding="utf-8")


def remove_parts(folder: Path) -> None:
    """Remove what a killed run may have left."""
    for part in folder.glob(f".*{_MARK}"):
        part.unlink(missing_ok=True)
