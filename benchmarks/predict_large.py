"""`dapcal predict` on a CSV file of some gigabytes: rows per second and peak memory of the process.

Run: python benchmarks/predict_large.py [gigabytes = 2] [training rows = 1000]
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def main(gigabytes: str = "2", training_rows: str = "1000") -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        lines = rows(int(training_rows))
        (folder / "train.csv").write_text(HEADER + "".join(lines))
        dapcal("fit", folder / "train.csv", "--target", "price", "--epochs", "10", "-o", folder / "m.dap")
        fitting = peak()
        write_large(folder / "large.csv", lines, float(gigabytes) * 1e9)
        started = time.perf_counter()
        dapcal("predict", folder / "m.dap", folder / "large.csv", "-o", folder / "out.csv")
        seconds = time.perf_counter() - started
        with (folder / "out.csv").open("rb") as file:
            written = sum(block.count(b"\n") for block in iter(lambda: file.read(2**24), b"")) - 1
        size = (folder / "large.csv").stat().st_size
        print(f"file                {size / 1e9:.2f} GB, {written:,} rows of 20 columns, {training_rows} training rows")
        print(f"rows per second     {written / seconds:,.0f}")
        print(f"peak memory         {peak():.0f} MiB (of fitting before: {fitting:.0f} MiB)")


HEADER = ",".join([*(f"x{number}" for number in range(18)), "city", "age", "price"]) + "\n"


def rows(count: int) -> list[str]:
    random = np.random.default_rng(0)
    numbers = random.normal(size=(count, 18))
    cities, ages = random.choice(["Rome", "Oslo", "Lima"], count), random.integers(1, 90, count)
    price = 3 * numbers[:, 0] + np.sin(numbers[:, 1]) + ages / 20
    return [
        ",".join([*(f"{value:.6f}" for value in line), city, str(age), f"{target:.3f}"]) + "\n"
        for line, city, age, target in zip(numbers, cities, ages, price, strict=True)
    ]


def write_large(path: Path, lines: list[str], size: float) -> None:
    """The same rows over and over; what they hold makes no difference to memory."""
    block = "".join(lines).encode()
    with path.open("wb") as file:
        file.write(HEADER.encode())
        for _ in range(max(1, round(size / len(block)))):
            file.write(block)


def dapcal(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "dapcal", *map(str, arguments), "--quiet"], check=True)


def peak() -> float:
    """Of the children that have ended, in MiB (the system counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
