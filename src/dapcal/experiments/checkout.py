"""Which commit a result was made from."""

from __future__ import annotations

import subprocess
from pathlib import Path

NOT_KNOWN = "not known"


def commit(inside: Path = Path(__file__).parent) -> str:
    """The commit of the checkout that holds a path, with what it was changed by; `NOT_KNOWN` outside a checkout.

    Folders of results are left out of "changed": a run that goes on writes there.
    """
    found = _git(inside, "rev-parse", "--short=12", "HEAD")
    top = _git(inside, "rev-parse", "--show-toplevel")
    if not found or top is None or not _git(Path(top), "ls-files", "--", "src/dapcal/experiments/checkout.py"):
        return NOT_KNOWN  # a package that was installed into a folder of some other project
    changed = _git(Path(top), "status", "--porcelain", "--untracked-files=no", "--", ".", ":!results", ":!docs")
    return f"{found}, changed" if changed else found


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
