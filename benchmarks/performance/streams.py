"""Memory of `calibrate` on training images that stay on disk."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import stream_memory

from dapcal.experiments.performance import Limit, Row

__all__ = ["rows"]

MOST = Limit(600.0, "ours")  # MB above the process before the call
SUBJECTS = {"network": "one network", "ensemble": "ensemble of three"}


def rows(repeats: int, small: bool) -> list[Row]:  # noqa: ARG001
    """One run of each: what is asked for is a peak, not a time."""
    images = 5_000 if small else 200_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images.bytes"
        stream_memory.write_images(path, images + stream_memory.HELD_OUT)
        found = {subject: measured(path, images, subject) for subject in SUBJECTS}
    shape = " × ".join(map(str, stream_memory.SHAPE))
    return [
        Row(
            f"anonymous memory of `calibrate`, {words}, {images:,} images of {shape} on disk",
            "MB",
            [found[subject]["megabytes"]],
            limit=MOST,
            note=f"{found[subject]['seconds']:.0f} s; spaces: {found[subject]['spaces']}",
        )
        for subject, words in SUBJECTS.items()
    ]


def measured(path: Path, images: int, subject: str) -> dict[str, float | str]:
    """In a process of its own."""
    words = ["--images", str(images), "--case", str(path), subject, "dataset"]
    command = [sys.executable, stream_memory.__file__, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])
