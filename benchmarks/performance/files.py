"""Loading an artefact of 2 GiB: mapped, and beside it read whole."""

from __future__ import annotations

import tempfile
from pathlib import Path

from load_time import WIDTH, in_a_process, made

from dapcal.experiments.performance import Limit, Row

__all__ = ["rows"]

READ = "the same file, read whole"
NO_COPY = 50.0  # MB, beside the file's pages


def rows(repeats: int, small: bool) -> list[Row]:
    size = 2**26 if small else 2**31
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.dap"
        made(size // (4 * WIDTH), path)
        found = [[in_a_process("one", str(path), way) for way in ("mapped", "read")] for _ in range(repeats)]
    name = f"an artefact of {size / 2**30:g} GiB"

    def row(words: str, key: str, unit: str, scale: float, limit: Limit | None, note: str = "") -> Row:
        ours, theirs = ([scale * run[place][key] for run in found] for place in (0, 1))
        return Row(f"{words} {name}", unit, ours, READ, theirs, limit, note=note)

    megabytes = {"unit": "MB", "scale": 1e-6}
    return [
        row("load", "load_seconds", "s", 1.0, Limit(1.0, "ours")),
        row("anonymous memory of loading", "load_anonymous_bytes", limit=Limit(NO_COPY, "ours"), **megabytes),
        row("first prediction from", "first_query_seconds", "s", 1.0, None, "every block is checked at its first read"),
    ]
