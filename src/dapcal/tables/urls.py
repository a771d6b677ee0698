"""Files that a URL names (s3://, gs://, hdfs://, file://, …): copied here, or there, by the file systems of pyarrow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.fs

from dapcal.files import complete_or_absent

_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+):/{1,3}(?P<rest>[^/].*)", re.IGNORECASE)


def url_of(path: Path) -> str | None:
    """The URL that a path was meant as, of which paths keep one slash; None where it is a path.

    >>> url_of(Path("s3://bucket/rows.parquet")), url_of(Path("file:///tmp/rows.csv")), url_of(Path("rows.csv"))
    ('s3://bucket/rows.parquet', 'file:///tmp/rows.csv', None)
    """
    found = _URL.fullmatch(path.as_posix())
    if found is None or path.exists():
        return None
    return f"{found['scheme']}://{'/' if found['scheme'].lower() == 'file' else ''}{found['rest']}"


def fetch(url: str, folder: Path) -> Path:
    """A copy of a file in a folder, under its own name."""
    with _reached(url) as (system, inner):
        info = system.get_file_info(inner)
    if info.type != pyarrow.fs.FileType.File:
        raise FileNotFoundError(f"There is no file {url}; name one by its whole URL, and several one after the other")
    target = folder / info.base_name
    with complete_or_absent(target) as part:
        pyarrow.fs.copy_files(inner, str(part), system, pyarrow.fs.LocalFileSystem())
    return target


def on_this_machine(url: str) -> Path | None:
    """The path that a URL names, file:///…; None where it lies elsewhere, on a store that can be reached."""
    with _reached(url) as (system, inner):
        if isinstance(system, pyarrow.fs.LocalFileSystem):
            return Path(inner)
        bucket = inner.partition("/")[0]
        if bucket and system.get_file_info(bucket).type == pyarrow.fs.FileType.NotFound:
            raise FileNotFoundError(f"There is no {bucket}, where {url} would lie; create it first")
    return None


def store(path: Path, url: str) -> None:
    """Copy a file to a URL."""
    with _reached(url, "written to") as (system, inner):
        pyarrow.fs.copy_files(str(path), inner, pyarrow.fs.LocalFileSystem(), system)


@contextmanager
def _reached(url: str, done: str = "reached") -> Iterator[tuple[pyarrow.fs.FileSystem, str]]:
    """The file system that a URL names, and the path in it; what fails in the block is told of the URL."""
    try:
        yield pyarrow.fs.FileSystem.from_uri(url)
    except FileNotFoundError as error:
        if error.errno is None:  # said here
            raise
        raise _told(url, done, error) from error
    except (pa.ArrowException, ImportError, OSError, ValueError) as error:
        raise _told(url, done, error) from error


def _told(url: str, done: str, error: Exception) -> OSError:
    words = " ".join(str(error).split())[:200]
    return OSError(f"{url} cannot be {done} ({words}); check the URL and what its store asks for")
