"""Files that are either complete or not there, whoever else writes them at the same time.

A writer works on a part file: created exclusively, under a random name, in its target's folder, and locked while it
is written. At the end the part takes the target's place, whole, with the mode and owner that the target had; of several
writers the last one to finish wins. What a killed writer has left is cleared by the next one, an hour later.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from dapcal.records import DapcalWarning

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_PART = re.compile(r"\.(?P<label>.+)\.[0-9a-f]{16}\.part", re.DOTALL)
_OLD_SECONDS = 3600
_LONGEST = 200  # bytes of a name that a part's name repeats; file systems allow 255


@contextmanager
def complete_or_absent(path: str | Path) -> Iterator[Path]:
    """A temporary file beside `path` to write into; it takes its place when the block ends without an error."""
    target = replaceable(path)
    label = _label(target)
    _clear(part for part in _parts_in(target.parent) if _label_of(part) == label)
    before = target.stat() if target.exists() else None
    part = target.with_name(f".{label}.{secrets.token_hex(8)}.part")
    # what replaces a file that others may not read is not shown to them on the way either
    lock = os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666 if before is None else 0o600)
    try:
        try:
            mode = stat.S_IMODE((before or os.fstat(lock)).st_mode)
            _take(lock)
            yield part
            with part.open("rb") as file:  # not `lock`: some libraries write a file of their own and move it here
                os.fsync(file.fileno())
                if not os.fstat(file.fileno()).st_size:
                    raise OSError(f"Nothing was written to {path}; it is as it was")
        finally:
            os.close(lock)  # nobody clears a part as young as this one
        _give(part, before, target)
        part.chmod(mode)  # after the owner, whose change may take bits away
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, complete or not at all."""
    with complete_or_absent(path) as part:
        part.write_text(text, encoding="utf-8")


def scratch() -> IO[bytes]:
    """A new file for bytes that nobody else wants, in the folder for temporary files; without a name, where it can."""
    file = tempfile.NamedTemporaryFile(prefix="dapcal-", delete=False)  # noqa: SIM115
    if os.name == "posix":
        Path(file.name).unlink()  # what is open stays until it is closed, or the process ends
    return file


def replaceable(path: str | Path) -> Path:
    """Where a file of this name really lies, symbolic links followed; an error where it cannot be put there."""
    path = Path(path)
    try:
        target = path.resolve()
        missing = path.is_symlink() and not target.exists()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise OSError(f"{path} cannot be followed ({error}); name another file") from error
    if missing:
        raise FileNotFoundError(f"{path} is a symbolic link to {target}, which does not exist; remove the link first")
    if target.is_dir():
        raise IsADirectoryError(f"Expected a file, but {path} is a folder; name a file in it")
    if target.exists() and not target.is_file():
        raise OSError(f"Expected a file, but {path} is a device or a pipe, and would be replaced; name a file")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"The folder {target.parent} does not exist; create it first")
    if not os.access(target.parent, os.W_OK):
        raise PermissionError(f"The folder {target.parent} cannot be written to; name a file in another")
    return target


def remove_parts(folder: Path) -> None:
    """Remove what killed writers have left in a folder: parts that nobody holds and that are older than an hour."""
    _clear(_parts_in(folder))


def _label(target: Path) -> str:
    """The target's name, or what stands for a name that leaves no room for more."""
    name = os.fsencode(target.name)
    return target.name if len(name) <= _LONGEST else hashlib.sha256(name).hexdigest()


def _label_of(part: Path) -> str:
    found = _PART.fullmatch(part.name)
    return found["label"] if found else ""


def _parts_in(folder: Path) -> Iterator[Path]:
    return (path for path in folder.glob(".*.part") if _label_of(path))


def _clear(parts: Iterable[Path]) -> None:
    for part in parts:
        with suppress(OSError):  # cleared by somebody else, another user's, or locked by a writer that takes its time
            seen = part.lstat()
            if stat.S_ISREG(seen.st_mode) and seen.st_mtime < time.time() - _OLD_SECONDS:
                _clear_if_free(part)


def _clear_if_free(part: Path) -> None:
    descriptor = os.open(part, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        if _take(descriptor):
            part.unlink()
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> bool:
    """Lock a part until it is closed; False where files have no locks, so that nobody can know whether it is in use."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        warnings.warn(
            "This file system has no locks: unfinished files (.*.part) that killed writers leave stay there",
            DapcalWarning,
            stacklevel=4,
        )
        return False
    return True


def _give(part: Path, before: os.stat_result | None, target: Path) -> None:
    """The owner and group that the target had."""
    if before is None or not hasattr(os, "chown"):
        return
    now = part.stat()
    if (now.st_uid, now.st_gid) == (before.st_uid, before.st_gid):
        return
    try:
        os.chown(part, before.st_uid, before.st_gid)
    except PermissionError:
        warnings.warn(f"{target} belonged to another user or group and is now yours", DapcalWarning, stacklevel=4)
