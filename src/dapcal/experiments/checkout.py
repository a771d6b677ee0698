"""Which commit a result was made from."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

NOT_KNOWN = "not known"
NOT_RECORDED = "not recorded"  # of files from before commits were recorded


def commit(inside: Path = Path(__file__).parent) -> str:
    """The commit of the checkout that holds a path, with what it was changed by; `NOT_KNOWN` outside a checkout.

    Folders of results are left out of "changed": a run that goes on writes there. Files that git does not know count
    in `src`, whose modules are imported.
    """
    found = _git(inside, "rev-parse", "--short=12", "HEAD")
    top = _git(inside, "rev-parse", "--show-toplevel")
    if not found or top is None or not _git(Path(top), "ls-files", "--", "src/dapcal/experiments/checkout.py"):
        return NOT_KNOWN  # a package that was installed into a folder of some other project
    known = _git(Path(top), "status", "--porcelain", "--untracked-files=no", "--", ".", ":!results", ":!docs")
    unknown = _git(Path(top), "status", "--porcelain", "--untracked-files=all", "--", "src")
    if known is None or unknown is None:
        return f"{found}, {NOT_KNOWN} whether changed"
    return f"{found}, changed" if known or unknown else found


def _git(folder: Path, *words: str) -> str | None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # a hook names its own
    own["GIT_OPTIONAL_LOCKS"] = "0"  # to look is not to write
    try:
        done = subprocess.run(
            ["git", *words], cwd=folder, env=own, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
