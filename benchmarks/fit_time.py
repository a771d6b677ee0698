"""`dapcal fit` and `dapcal fit --fast` on 10,000 rows of 20 columns: seconds of the clock and the processor.

Both take turns. On a machine that others load the clock says little; seconds of the processor, all threads together,
say what a quiet one needs at most. The bars on two quiet cores: 60 s, with --fast 15 s; of 100,000 rows and 30 columns
8 minutes (by default alone). The file keeps what it holds of tables of other sizes.

Run: python benchmarks/fit_time.py results [rows = 10000] [columns = 20] [turns = 1]
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from dapcal.experiments.records import environment
from dapcal.files import write_text

LARGE = 50_000  # rows, from which on --fast is not asked


def main(results: str, rows: str = "10000", columns: str = "20", turns: str = "1") -> None:
    path = Path(results) / "fit-time.json"
    told = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"experiment": "fit-time", "tables": {}}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write(folder / "train.csv", int(rows), int(columns))
        print(f"table     {int(rows):,} rows, {columns} columns")
        ways = ("--fast", "default") if int(rows) < LARGE else ("default",)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(int(turns)):
            for name, own in found.items():
                own.append(fit(folder, *([name] if name == "--fast" else [])))
        for name, own in found.items():
            clock, processor = (statistics.median(part) for part in zip(*own, strict=True))
            print(f"{name:<10}{clock:.1f} s, {processor:.1f} s of the processor", flush=True)
    told["tables"][f"{rows} × {columns}"] = {
        "seconds": {name: [round(clock, 2) for clock, _ in own] for name, own in found.items()},
        "processor_seconds": {name: [round(used, 2) for _, used in own] for name, own in found.items()},
        "load_before": round(load, 2),
        "environment": environment() | {"cores": str(len(os.sched_getaffinity(0)))},
    }
    write_text(path, json.dumps(told, indent=1, ensure_ascii=False) + "\n")


def write(path: Path, rows: int, columns: int) -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, columns))
    y = np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.3 * x[:, 3:].sum(1) + 0.3 * generator.normal(size=rows)
    header = ",".join([*(f"x{number}" for number in range(columns)), "y"])
    np.savetxt(path, np.column_stack([x, y]), delimiter=",", header=header, comments="", fmt="%.5f")


def fit(folder: Path, *options: str) -> tuple[float, float]:
    """Seconds by the clock and of the processor."""
    command = [sys.executable, "-m", "dapcal", "fit", str(folder / "train.csv"), "--target", "y", "--quiet"]
    started, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*command, "-o", str(folder / "model.dap"), *options], check=True, stdout=subprocess.DEVNULL)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - started, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


if __name__ == "__main__":
    main(*sys.argv[1:])
