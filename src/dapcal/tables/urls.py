"""Files that a URL names (s3://, gs://, hdfs://, file://, …): copied here, through the file systems of pyarrow."""

from __future__ import annotations

import re
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
    try:
        system, inner = pyarrow.fs.FileSystem.from_uri(url)
        info = system.get_file_info(inner)
    except (pa.ArrowException, OSError) as error:
        told = " ".join(str(error).split())[:200]
        raise OSError(f"{url} cannot be reached ({told}); check the URL and what its store asks for") from error
    if info.type != pyarrow.fs.FileType.File:
        raise FileNotFoundError(f"There is no file {url}; name one by its whole URL, and several one after the other")
    target = folder / info.base_name
    with complete_or_absent(target) as part:
        pyarrow.fs.copy_files(inner, str(part), system, pyarrow.fs.LocalFileSystem())
    return target
