"""`dapcal fit` with and without gap cross-validation, on a table of 10,000 rows and 20 columns: seconds and ratio.

Both ways take turns, so that a busy machine slows both. The bar is a ratio of 2.5.

Run: python benchmarks/fit_time.py [rows = 10000] [columns = 20] [turns = 1]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def main(rows: str = "10000", columns: str = "20", turns: str = "1") -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write(folder / "train.csv", int(rows), int(columns))
        seconds: dict[str, list[float]] = {"fast": [], "default": []}
        for _ in range(int(turns)):
            seconds["fast"].append(fit(folder, "--fast"))
            seconds["default"].append(fit(folder))
        fast, default = (statistics.median(own) for own in seconds.values())
        print(f"table     {int(rows):,} rows, {columns} columns")
        print(f"--fast    {fast:.1f} s")
        print(f"default   {default:.1f} s")
        print(f"ratio     {default / fast:.2f} (at most 2.5)")


def write(path: Path, rows: int, columns: int) -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, columns))
    y = np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.3 * x[:, 3:].sum(1) + 0.3 * generator.normal(size=rows)
    header = ",".join([*(f"x{number}" for number in range(columns)), "y"])
    np.savetxt(path, np.column_stack([x, y]), delimiter=",", header=header, comments="", fmt="%.5f")


def fit(folder: Path, *options: str) -> float:
    command = [sys.executable, "-m", "dapcal", "fit", str(folder / "train.csv"), "--target", "y", "--quiet"]
    started = time.perf_counter()
    subprocess.run([*command, "-o", str(folder / "model.dap"), *options], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


if __name__ == "__main__":
    main(*sys.argv[1:])
