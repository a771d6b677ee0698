"""The blocks of an output that are finished, in a folder beside it, from which a run that was ended goes on.

A block is a file that is complete or not there. A manifest says what they are blocks of: the model, the input files,
what was asked, and the versions; blocks of anything else are not used.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from dapcal.files import complete_or_absent, remove_parts, write_text

_MANIFEST = "manifest.json"
_OWN = re.compile(r"manifest\.json|\d{8,}\.arrow|\..*\.part")  # names of files that a run leaves


class Parts:
    """Finished blocks, by number."""

    def __init__(self, out: Path) -> None:
        self.folder = out.with_name(f"{out.name}.parts")

    def begin(self, about: Mapping[str, Any]) -> str:
        """Make the folder, or keep what is there of the same work; a note where there was anything to be said of it."""
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"{self.folder} is a file, where unfinished blocks go; remove or rename it")
        strange = [path.name for path in self.folder.glob("*") if not _OWN.fullmatch(path.name)]
        if strange:  # nothing is removed that is not known to be of a run
            raise ValueError(
                f"{self.folder} holds {strange[0]}, where unfinished blocks go; move it, or name another --out"
            )
        manifest = self.folder / _MANIFEST
        words = json.dumps(about, indent=1, sort_keys=True)
        before = manifest.read_text(encoding="utf-8") if manifest.exists() else None
        note = ""
        if self.folder.exists():
            found = len(list(self.folder.glob("*.arrow")))
            if before == words:
                note = f"going on with {_blocks(found)} of {self.folder}" if found else ""
            elif found:
                other = _differences(before, about)
                note = f"{self.folder} held {_blocks(found)} of other work ({other}), which are not used"
            if before != words:
                shutil.rmtree(self.folder)
        self.folder.mkdir(exist_ok=True)
        remove_parts(self.folder)
        write_text(manifest, words)
        return note

    def path(self, number: int) -> Path:
        """Where a block lies."""
        return self.folder / f"{number:08d}.arrow"

    def write(self, number: int, content: pa.Buffer) -> None:
        """Keep a block, whole."""
        with complete_or_absent(self.path(number)) as part:
            part.write_bytes(content)

    def has(self, number: int) -> bool:
        """Whether a block is finished."""
        return self.path(number).exists()

    def remove(self) -> None:
        """All of it, once the output is there."""
        shutil.rmtree(self.folder)


def about_files(paths: Sequence[Path], brought: Mapping[Path, str]) -> list[list[Any]]:
    """What tells input files from others, without reading them: name, size, and when they were written.

    Of those that were brought here, their first name and what they hold.
    """
    return [
        [brought[path], digest(path)]
        if path in brought
        else [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]
        for path in paths
    ]


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _blocks(count: int) -> str:
    return "1 finished block" if count == 1 else f"{count:,} finished blocks"


def _differences(before: str | None, about: Mapping[str, Any]) -> str:
    if before is None:
        return "without a manifest"
    known = json.loads(before)
    return "other " + ", ".join(name for name in about if known.get(name) != json.loads(json.dumps(about[name])))
