"""What loading a large artefact costs: mapped and checked at first use, beside read whole, in fresh processes.

An artefact of 2 GiB of training points is made in a folder for temporary files. Every number is of a process of its
own, which loads it and asks for two predictions; mapped and read take turns. The file is in the system's cache for
both, as it is after it was written, where there is room. Memory is what a process has for itself (anonymous), above
what it had before it loaded; "shared" is what a second process has of the file while the first one uses it.

Run: python benchmarks/load_time.py [gibibytes] [rounds] [result file]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dapcal
from dapcal import container
from dapcal.distances import Distance, NearestNeighbor, Space, TorchIndex
from dapcal.distances.projectors import Identity
from dapcal.experiments.records import environment, short, with_leaves
from dapcal.files import write_text
from dapcal.likelihoods import Categorical
from dapcal.posteriors import gaussian

WIDTH, CLASSES, SEED = 64, 3, 0
RESULT = Path("results/load-time.json")


def main(size: str = "2", rounds: str = "3", result: str = str(RESULT)) -> None:
    measured: dict[str, list[dict[str, float]]] = {"mapped": [], "read": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.dap"
        rows = int(float(size) * 2**30) // (4 * WIDTH)
        made(rows, path)
        for _ in range(int(rounds)):
            for way, runs in measured.items():
                runs.append(in_a_process("one", str(path), way))
        checked = [doctor(path) for _ in range(int(rounds))]
        second = in_a_process("two", str(path), "mapped")
        bytes_of_file = path.stat().st_size
    middle = {
        way: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for way, runs in measured.items()
    }
    show(middle, statistics.median(checked), second, bytes_of_file)
    numbers = {
        "experiment": "load-time",
        "environment": environment(),
        "bytes": bytes_of_file,
        "points": [rows, WIDTH],
        "threads": torch.get_num_threads(),
        "runs": measured,
        "median": middle,
        "doctor_seconds": checked,
        "second_process": second,
        "load_ratio": middle["mapped"]["load_seconds"] / middle["read"]["load_seconds"],
    }
    write_text(result, json.dumps(with_leaves(numbers, short), indent=1) + "\n")
    print(f"written to {result}")


def network() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def made(rows: int, path: Path) -> dapcal.Calibrated:
    """An artefact whose index has so many points, and what is in it.

    Its radius and scores are of fewer points, which costs nothing.
    """
    model = network()
    scale = {name: torch.full_like(value, 0.1) for name, value in model.named_parameters()}
    x = torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(SEED))
    y = model(x).argmax(1)
    calibrated = dapcal.calibrate(
        gaussian.diagonal(model, Categorical(), scale, draws=8),
        train=(x[:200], y[:200]),
        held_out=(x[200:], y[200:]),
        distance=Space(Identity(), name="inputs"),
    )
    points = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(SEED + 1))
    space = replace(calibrated.distance.spaces[0], metric=NearestNeighbor(TorchIndex(points), 1, "max"))
    large = replace(calibrated, distance=Distance((space,)))
    large.save(path)
    return large


def in_a_process(*arguments: str) -> dict[str, Any]:
    return json.loads(subprocess.check_output([sys.executable, __file__, *arguments]))


def memory() -> dict[str, int]:
    """Bytes of this process by kind, where the system tells (Linux)."""
    place = Path("/proc/self/smaps_rollup")
    lines = [line.split() for line in place.read_text().splitlines()[1:]] if place.exists() else []
    return {"Anonymous": 0, "Shared_Clean": 0, **{words[0].rstrip(":"): int(words[1]) << 10 for words in lines}}


def one(path: Path, way: str) -> dict[str, float]:
    """Load, and ask twice."""
    if way == "read":
        container.LARGE = 2**62
    inputs, before = torch.zeros(1, WIDTH), memory()
    start = time.perf_counter()
    loaded = dapcal.load(path, network())
    load = time.perf_counter() - start
    after = memory()
    start = time.perf_counter()
    loaded(inputs)
    first = time.perf_counter() - start
    start = time.perf_counter()
    loaded(inputs)
    return {
        "load_seconds": load,
        "load_anonymous_bytes": after["Anonymous"] - before["Anonymous"],
        "first_query_seconds": first,
        "next_query_seconds": time.perf_counter() - start,
        "anonymous_bytes": memory()["Anonymous"] - before["Anonymous"],
        "shared_bytes": memory()["Shared_Clean"] - before["Shared_Clean"],
    }


def two(path: Path, way: str) -> dict[str, float]:
    """What a process has that uses the same file as this one."""
    loaded = dapcal.load(path, network())
    loaded(torch.zeros(1, WIDTH))
    return in_a_process("one", str(path), way)


def doctor(path: Path) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "dapcal", "doctor", str(path), "--quiet"], check=True)
    return time.perf_counter() - start


def show(middle: dict[str, dict[str, float]], checked: float, second: dict[str, float], size: int) -> None:
    print(f"{size / 2**30:.2f} GiB, medians{'mapped':>14}{'read whole':>14}{'ratio':>10}")
    for name in middle["mapped"]:
        unit = 2**20 if name.endswith("bytes") else 1
        mapped, read = middle["mapped"][name] / unit, middle["read"][name] / unit
        label = name.replace("_bytes", " MiB").replace("_", " ")
        print(f"{label:<24}{mapped:14.3f}{read:14.3f}{mapped / read if read else float('nan'):10.4f}")
    print(f"dapcal doctor FILE      {checked:14.3f} s")
    own, shared = (second[name] / 2**20 for name in ("anonymous_bytes", "shared_bytes"))
    print(f"a second process has    {own:14.1f} MiB of its own, shares {shared:.0f} MiB")


if __name__ == "__main__":
    if sys.argv[1:2] in (["one"], ["two"]):
        print(json.dumps({"one": one, "two": two}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])))
    else:
        main(*sys.argv[1:])
