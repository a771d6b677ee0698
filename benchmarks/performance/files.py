"""An artefact of 2 GiB: saved, beside its numbers written raw; loaded, mapped and beside it read whole."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path

from load_time import WIDTH, in_a_process, made
from torch import Tensor

from dapcal.experiments.performance import Limit, Row
from performance.turns import in_turns

__all__ = ["rows"]

READ = "the same file, read whole"
RAW = "its points written raw"
NO_COPY = 50.0  # MB, beside the file's pages


def rows(repeats: int, small: bool) -> list[Row]:
    size = 2**26 if small else 2**31
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.dap"
        calibrated = made(size // (4 * WIDTH), path)
        points = calibrated.distance.spaces[0].metric.index.points
        ways = {"ours": partial(calibrated.save, path), RAW: partial(write_raw, points, path.with_suffix(".raw"))}
        saved = in_turns(ways, min(repeats, 3), warm=False)  # the disk is what takes the time
        path.with_suffix(".raw").unlink()
        del calibrated, points, ways
        found = [[in_a_process("one", str(path), way) for way in ("mapped", "read")] for _ in range(repeats)]
    name = f"an artefact of {size / 2**30:g} GiB"

    def row(words: str, key: str, unit: str, scale: float, limit: Limit | None, note: str = "") -> Row:
        ours, theirs = ([scale * run[place][key] for run in found] for place in (0, 1))
        return Row(f"{words} {name}", unit, ours, READ, theirs, limit, note=note)

    megabytes = {"unit": "MB", "scale": 1e-6}
    note = "the file holds a checksum of every block, and replaces the one before when it is complete"
    return [
        Row(f"save {name}", "s", saved["ours"], RAW, saved[RAW], note=note),
        row("load", "load_seconds", "s", 1.0, Limit(1.0, "ours")),
        row("anonymous memory of loading", "load_anonymous_bytes", limit=Limit(NO_COPY, "ours"), **megabytes),
        row("first prediction from", "first_query_seconds", "s", 1.0, None, "every block is checked at its first read"),
    ]


def write_raw(points: Tensor, path: Path) -> None:
    """Bytes of numbers, on the disk when this comes back."""
    with path.open("wb") as file:
        file.write(points.numpy().data)
        file.flush()
        os.fsync(file.fileno())
