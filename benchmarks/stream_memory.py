"""Memory of `calibrate` on training images that stay on disk, beside the same images as tensors.

Made-up images of 3 × 32 × 32 in ten classes lie in a file of bytes; a Dataset reads them one by one. Measured is
anonymous memory (file-backed pages apart) at its peak, above what the process had before the call, each case in a
process of its own. Run: python benchmarks/stream_memory.py [--images 200000] [--out results/stream-memory.json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import dapcal
from dapcal.experiments.records import environment
from dapcal.files import write_text
from dapcal.likelihoods import Categorical
from dapcal.posteriors import ensemble
from dapcal.types import Posterior

SHAPE = (3, 32, 32)
CLASSES = 10
HELD_OUT = 120
SUBJECTS = ("network", "ensemble")
KINDS = ("dataset", "tensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=200_000)
    parser.add_argument("--subjects", nargs="+", default=SUBJECTS, choices=SUBJECTS)
    parser.add_argument("--kinds", nargs="+", default=["dataset"], choices=KINDS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", nargs=3, metavar=("FILE", "SUBJECT", "KIND"), help="one case, in this process")
    options = parser.parse_args()
    if options.case:
        file, subject, kind = options.case
        print(json.dumps(measured(Path(file), options.images, subject, kind)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images.bytes"
        write_images(path, options.images + HELD_OUT)
        rows = []
        for subject in options.subjects:
            for kind in options.kinds:
                case = ["--images", str(options.images), "--case", str(path), subject, kind]
                done = subprocess.run([sys.executable, __file__, *case], stdout=subprocess.PIPE, check=True, text=True)
                rows.append(json.loads(done.stdout.splitlines()[-1]))
                print(rows[-1], flush=True)
    if options.out is not None:
        found = {"images": options.images, "shape": SHAPE, "held_out": HELD_OUT, "cases": rows}
        write_text(options.out, json.dumps(found | {"environment": environment()}, indent=1) + "\n")


def measured(path: Path, images: int, subject: str, kind: str) -> dict[str, float | str]:
    """Peak memory, seconds and φ of one call."""
    warnings.simplefilter("ignore", dapcal.DapcalWarning)
    torch.manual_seed(0)
    data = Images(path, 0, images)
    held_out = Images(path, images, images + HELD_OUT)
    networks = [trained(data, seed) for seed in range(1 if subject == "network" else 3)]
    model: nn.Module | Posterior = networks[0] if subject == "network" else ensemble.of(networks, Categorical())
    train = data if kind == "dataset" else data.tensors()
    start = time.perf_counter()
    with anonymous_peak() as peak:
        calibrated = dapcal.calibrate(model, train=train, held_out=held_out)
    return {
        "subject": subject,
        "train": kind,
        "megabytes": round(peak[0], 1),
        "seconds": round(time.perf_counter() - start, 1),
        "phi": calibrated.phi,
        "spaces": ", ".join(space.name for space in calibrated.distance.spaces),
    }


class Images(Dataset):
    """Some of the images in a file, each as numbers in [0, 1] and its class."""

    def __init__(self, path: Path, start: int, stop: int) -> None:
        self.pixels = np.memmap(path, np.uint8, "r").reshape(-1, *SHAPE)
        self.start, self.stop = start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        if not 0 <= row < len(self):
            raise IndexError(row)
        return torch.from_numpy(self.pixels[self.start + row] / np.float32(255)), (self.start + row) % CLASSES

    def tensors(self) -> tuple[Tensor, Tensor]:
        """All of them in memory."""
        x = torch.empty(len(self), *SHAPE)
        for row in range(len(self)):
            x[row] = self[row][0]
        return x, torch.arange(self.start, self.stop) % CLASSES


def write_images(path: Path, images: int) -> None:
    """A pattern a class, or that of another one at some places, and noise."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 156, (CLASSES, 3, 4, 4), np.uint8).repeat(8, 2).repeat(8, 3)
    with path.open("wb") as file:
        for start in range(0, images, 4096):
            rows = np.arange(start, min(start + 4096, images))
            own, other = patterns[rows % CLASSES], patterns[rng.integers(CLASSES, size=len(rows))]
            pixels = np.where(rng.integers(0, 4, (len(rows), 1, 32, 32), np.uint8) < 2, other, own)
            file.write((pixels + rng.integers(0, 100, pixels.shape, np.uint8)).tobytes())


def trained(data: Dataset, seed: int, steps: int = 150) -> nn.Module:
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, CLASSES),
    )  # fmt: skip
    optimizer = torch.optim.Adam(network.parameters(), 2e-3)
    for _ in range(steps):
        rows = [data[int(row)] for row in torch.randint(len(data), (64,))]
        x, y = torch.stack([x for x, _ in rows]), torch.tensor([y for _, y in rows])
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    return network


@contextmanager
def anonymous_peak() -> Iterator[list[float]]:
    """Megabytes of anonymous memory at the peak, above those at the start; known when the block ends."""
    before, found, ended = anonymous(), [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            found[0] = max(found[0], (anonymous() - before) / 1e6)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()


def anonymous() -> int:
    """Bytes that belong to this process and to no file (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


if __name__ == "__main__":
    main()
