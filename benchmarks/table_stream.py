"""Memory and time of a large CSV file, streamed and encoded batch by batch.

Writes a table of 15 numbers and 5 categories of about the size asked for into a temporary folder, fits an encoder to
its first rows, and streams all of it. Run: python benchmarks/table_stream.py [gigabytes]
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

from dapcal.tables import fit_encoder, stream

ROWS = 100_000


def block(rng: np.random.Generator) -> pa.Table:
    numbers = {f"number {i}": rng.normal(size=ROWS) for i in range(15)}
    categories = {f"category {i}": rng.choice(["red", "green", "blue", "n/a"], ROWS) for i in range(5)}
    return pa.table(numbers | categories | {"y": rng.normal(size=ROWS)})


def peak() -> float:
    """MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    gigabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    rng = np.random.default_rng(0)
    table = block(rng)
    encoder = fit_encoder(table, "y")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.csv"
        with path.open("wb") as file:
            pa.csv.write_csv(table, file)
            while file.tell() < gigabytes * 1e9:
                pa.csv.write_csv(table, file, pa.csv.WriteOptions(include_header=False))
        before, start, rows = peak(), time.perf_counter(), 0
        for batch in stream(path, encoder.expected):
            rows += len(encoder(batch).x)
        seconds = time.perf_counter() - start
        size = path.stat().st_size / 1e9
    print(f"{size:.2f} GB, {rows:,} rows: {seconds:.1f} s, {rows / seconds:,.0f} rows/s")
    print(f"peak memory: {before:.0f} MiB before streaming, {peak():.0f} MiB after")


if __name__ == "__main__":
    main()
