"""What a prediction costs with the number of rows, training points, dimensions, draws and classes: slopes.

Processor seconds of one core, for one axis at a time while the others stay; the smallest of several repetitions.

Run: python benchmarks/scale.py [--out results/scale.json] [--repeats 4]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

import dapcal
from dapcal.distances import Identity, Space
from dapcal.distances.projectors import Features
from dapcal.experiments.records import environment
from dapcal.likelihoods import Categorical
from dapcal.posteriors import ensemble


@dataclass(frozen=True)
class Size:
    """What a prediction's cost may depend on."""

    rows: int = 2048
    training_points: int = 8000
    dimensions: int = 20
    draws: int = 5
    classes: int = 3


AXES = {
    "rows": (512, 2048, 8192),
    "training_points": (2000, 8000, 32000, 64000),
    "dimensions": (10, 20, 80, 320),
    "draws": (2, 5, 10, 20),
    "classes": (2, 10, 50, 200),
}
WIDTH = 64  # of hidden layers, whose inputs are the features


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/scale.json"))
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {}
    for axis, values in AXES.items():
        measured = [cost(replace(Size(), **{axis: value}), options.repeats) for value in values]
        seconds = [one["seconds"] for one in measured]
        slope, start = np.polyfit(values, seconds, 1, w=1 / np.array(seconds))  # so that small ones count as much
        found[axis] = {"values": list(values), "measured": measured, "slope": slope, "start": start}
        print(axis, [round(s, 4) for s in seconds], f"{start:.4g} + {slope:.4g} per one", flush=True)
    told = {
        "experiment": "scale",
        "environment": environment(),
        "base": asdict(Size()),
        "hidden_units": WIDTH,
        "axes": found,
    }
    options.out.write_text(json.dumps(told, indent=1) + "\n")


def cost(size: Size, repeats: int) -> dict[str, float]:
    """Processor seconds of all rows, and bytes of the file."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size.training_points, size.dimensions, generator=generator)
    y = torch.randint(size.classes, (size.training_points,), generator=generator)
    held = (
        torch.randn(200, size.dimensions, generator=generator),
        torch.randint(size.classes, (200,), generator=generator),
    )
    torch.manual_seed(0)
    posterior = ensemble.of([network(size) for _ in range(size.draws)], Categorical())
    spaces = (Space(Features(), name="features"), Space(Identity(), name="inputs"))
    calibrated = dapcal.calibrate(posterior, train=(x, y), held_out=held, distance=spaces, temperature=False)
    rows = torch.randn(size.rows, size.dimensions, generator=generator)
    seconds = []
    for _ in range(repeats + 1):
        started = time.process_time()
        calibrated(rows)
        seconds.append(time.process_time() - started)
    with tempfile.TemporaryDirectory() as folder:
        calibrated.save(Path(folder) / "m.dap")
        kept = (Path(folder) / "m.dap").stat().st_size
    return {"seconds": min(seconds[1:]), "file_bytes": kept}


def network(size: Size) -> nn.Module:
    return nn.Sequential(
        nn.Linear(size.dimensions, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, size.classes)
    ).eval()


if __name__ == "__main__":
    main()
