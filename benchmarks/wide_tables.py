"""How the time of `dapcal fit` and `dapcal predict` grows with the columns of a table: 2,000 take at most 5 times 500.

python benchmarks/wide_tables.py [--rows 400] [--columns 500 2000] [--out results/wide-tables.json]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from dapcal.experiments.records import environment
from dapcal.files import write_text

START = "from dapcal.cli import main; main()"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--columns", type=int, nargs="+", default=[500, 2000])
    parser.add_argument("--fit", nargs="*", default=[], help="further options of dapcal fit, without --")
    parser.add_argument("--out", type=Path, help="a result file")
    given = parser.parse_args()
    seconds: dict[str, list[float]] = {"nothing": [], "fit": [], "predict": []}
    peaks: list[float] = []
    for columns in given.columns:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            write(place / "wide.csv", given.rows, columns)
            options = [f"--{option}" for option in given.fit]
            commands = {
                "nothing": ["--version"],
                "fit": ["fit", "wide.csv", "--target", "target", "-o", "wide.dap", "--quiet", *options],
                "predict": ["predict", "wide.dap", "wide.csv", "-o", "out.csv", "--quiet"],
            }
            for name, command in commands.items():
                seconds[name].append(round(timed(command, place), 2))
            told = ", ".join(f"{name} {values[-1]:.1f} s" for name, values in seconds.items())
            peaks.append(round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, 2))
            print(f"{columns} columns × {given.rows} rows: {told} of processor time, peak {peaks[-1]} GiB", flush=True)
    for name in ("fit", "predict"):
        first, last = seconds[name][0], seconds[name][-1]
        wider = given.columns[-1] / given.columns[0]
        print(f"{name}: {last / first:.2f} times the time for {wider:g} times the columns")
    if given.out:
        found = {
            "experiment": "wide-tables",
            "environment": environment(),
            "rows": given.rows,
            "columns": given.columns,
            "processor_seconds": seconds,
            "peak_gib": peaks,
        }
        write_text(given.out, json.dumps(found, indent=1) + "\n")


def write(path: Path, rows: int, columns: int) -> None:
    """Numbers, and a category in every tenth column."""
    random = np.random.default_rng(0)
    values = random.normal(size=(rows, columns))
    target = values[:, :5].sum(1) + 0.1 * random.normal(size=rows)
    texts = np.char.mod("%.4g", values)
    texts[:, ::10] = np.array(["a", "b", "c"])[(values[:, ::10] > 0).astype(int) + (values[:, ::10] > 1)]
    lines = [",".join([*(f"column {i}" for i in range(columns)), "target"])]
    lines += [",".join([*row, f"{y:.4g}"]) for row, y in zip(texts, target, strict=True)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def timed(command: list[str], place: Path) -> float:
    """Processor time of a command; what others do on the machine does not count."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", START, *command], cwd=place, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return min(used, time.monotonic() - began) if used <= 0 else used


if __name__ == "__main__":
    main()
