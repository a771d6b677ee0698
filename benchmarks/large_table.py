"""Memory and time of `dapcal fit` on a table that is too large to hold.

Writes a Parquet file of 16 numbers and 4 categories, chunk by chunk, fits a model to it in a process of its own, and
watches the anonymous memory of that process (file-backed pages apart; Linux). Errors are those at new rows: of the
members that predict, which have learnt from all rows, and of those of the sample. Distances of new rows are measured
from the rows that the model keeps, and once more from all rows: what the sample makes of them. Run:

    python benchmarks/large_table.py [--rows 10000000] [--out results/large-table.json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch
from torch import Tensor

from dapcal.distances import NearestNeighbor, TorchIndex
from dapcal.distances.projectors import project
from dapcal.experiments.records import environment
from dapcal.files import write_text
from dapcal.models.loading import load
from dapcal.tables import stream

NUMBERS, CATEGORIES, CHUNK, NEW = 16, 4, 250_000, 20_000
MEASURED = 1_000  # new rows whose distances are compared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, model = Path(folder) / "rows.parquet", Path(folder) / "model.dap"
        write_rows(path, options.rows)
        print(f"written: {path.stat().st_size / 1e9:.2f} GB", flush=True)
        start = time.perf_counter()
        peak = watched([sys.executable, "-m", "dapcal", "fit", str(path), "--target", "y", "-o", str(model)])
        found = {
            "rows": options.rows,
            "columns": NUMBERS + CATEGORIES,
            "gigabytes": round(peak / 1e9, 2),
            "seconds": round(time.perf_counter() - start),
            "model_megabytes": round(model.stat().st_size / 1e6, 1),
            **errors(model),
            "distances": distances(model, path),
        }
    print(found)
    if options.out is not None:
        write_text(options.out, json.dumps(found | {"environment": environment()}, indent=1) + "\n")


def block(rng: np.random.Generator, rows: int) -> pa.Table:
    """Rows whose target bends, jumps between categories and is noisy."""
    x = rng.normal(size=(rows, NUMBERS)).astype(np.float32)
    codes = rng.integers(5, size=(rows, CATEGORIES))
    y = np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.5 * x[:, 3:9].sum(1) + (codes[:, 0] == 2) * x[:, 4]
    columns = {f"number {i}": x[:, i] for i in range(NUMBERS)}
    names = np.array(["red", "green", "blue", "white", "black"])
    columns |= {f"category {i}": pa.array(names[codes[:, i]]).dictionary_encode() for i in range(CATEGORIES)}
    return pa.table(columns | {"y": (y + 0.3 * rng.normal(size=rows)).astype(np.float32)})


def write_rows(path: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    with pa.parquet.ParquetWriter(path, block(rng, 1).schema) as writer:
        for start in range(0, rows, CHUNK):
            writer.write_table(block(rng, min(CHUNK, rows - start)))


def watched(command: list[str]) -> int:
    """Bytes of anonymous memory at the peak of a process, which must end well."""
    peak = 0
    process = subprocess.Popen(command)
    while process.poll() is None:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            peak = max([peak, *(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))])
        except OSError:  # it has just ended
            pass
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(process.returncode)
    return peak


def errors(path: Path) -> dict[str, float]:
    """Root mean squared errors at new rows."""
    rows, model = block(np.random.default_rng(1), NEW), load(path)
    y = rows["y"].to_numpy()
    x = model.encoder(rows).x
    found = {"all_rows": model.calibrated, "sample": model.calibrated.judging}
    means = {name: model.target.decode(one.predict(x).mean).flatten().numpy() for name, one in found.items()}
    return {f"rmse_{name}": round(float(np.sqrt(np.mean((mean - y) ** 2))), 4) for name, mean in means.items()}


@torch.inference_mode()
def distances(path: Path, table: Path) -> dict[str, object]:
    """Of new rows from the rows that a model keeps, and from all rows of the table, as d0 and space by space."""
    model = load(path)
    measure = model.calibrated.distance
    new = model.encoder(block(np.random.default_rng(2), MEASURED)).x
    kept = measure.raw(new)  # (spaces, N)
    places = [place for place, space in enumerate(measure.spaces) if isinstance(space.metric, NearestNeighbor)]
    asked = {place: project(measure.spaces[place].projector, new) for place in places}
    nearest: dict[int, Tensor] = {}
    for batch in stream(table, model.encoder.expected):
        x = model.encoder(batch).x
        for place, queries in asked.items():
            space = measure.spaces[place]
            points, k = torch.cat([project(space.projector, part) for part in x.split(8192)]), space.metric.k
            found = TorchIndex(points).query(queries, min(k, len(points)))[0]
            nearest[place] = torch.cat([nearest.get(place, found[:, :0]), found], 1).sort(1).values[:, :k]
    all_rows = kept.clone()
    for place, found in nearest.items():
        all_rows[place] = found[:, -1]
    d0 = {"sample": measure.combine(kept), "all_rows": measure.combine(all_rows)}
    found = {}
    for place in places:
        excess = (kept[place] / all_rows[place].clamp_min(torch.finfo(kept.dtype).tiny) - 1).double()
        found[measure.spaces[place].name] = [round(float(excess.quantile(share)), 4) for share in (0.5, 0.99)]
    return {
        "new_rows": MEASURED,
        "too_large": found,  # of themselves, half of them and 99 % at most
        "beyond_radius": {name: round(float((own > 0).double().mean()), 4) for name, own in d0.items()},
        "mean_d0": {name: round(float(own.mean()), 4) for name, own in d0.items()},
    }


if __name__ == "__main__":
    main()
