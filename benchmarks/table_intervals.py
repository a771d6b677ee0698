"""How many targets the 95 % intervals of `dapcal fit` hold, pooled over many random splits of 80/20 of every table.

Over all rows, and over fifths of the prediction and of the distance from the training rows. Standard errors are those
of the mean over splits, so that what the choice of judging rows does is in them. Gap cross-validation is left out, and
of large tables a random 1,500 training rows are taken, both to save time.

    python benchmarks/tables.py prepare FOLDER --seeds 20 --tables diabetes,boston,...      splits and encodes
    python benchmarks/table_intervals.py FOLDER [--splits 20] [--tables a,b] [--jobs 2] [--again] [--result results/...]

It goes on where an earlier run stopped, split by split; `--again` forgets the rows of its tables first.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from as_fitted import LEVEL, fitted

from dapcal.experiments.records import environment
from dapcal.files import write_text
from dapcal.recipes import Recipe

TABLES = ("diabetes", "boston", "energy", "concrete", "insurance", "wine_red", "ames", "naval")
MOST = 1500  # training rows


def main() -> None:
    asked = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    asked.add_argument("folder", type=Path)
    asked.add_argument("--splits", type=int, default=20)
    asked.add_argument("--tables", default=",".join(TABLES))
    asked.add_argument("--jobs", type=int, default=2)
    asked.add_argument("--again", action="store_true")
    asked.add_argument("--result", type=Path, default=Path("results/table-intervals.json"))
    options = asked.parse_args()
    for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[threads] = "1"
    done = json.loads(options.result.read_text())["rows"] if options.result.exists() else []
    if options.again:
        done = [row for row in done if row["table"] not in options.tables.split(",")]
    known = {(row["table"], row["split"]) for row in done}
    asking = [(t, s) for s in range(options.splits) for t in options.tables.split(",") if (t, s) not in known]
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        calls = [pool.submit(row_of, options.folder, *job) for job in asking]
        for call in as_completed(calls):
            done.append(call.result())
            print(json.dumps(done[-1]), flush=True)
            write(options.result, done)
    for name in dict.fromkeys(row["table"] for row in done):
        own = [row for row in done if row["table"] == name]
        shares = np.array([row["inside"] / row["rows"] for row in own])
        print(f"{name:12} {len(own):3} splits: {shares.mean():.4f} ± {shares.std(ddof=1) / np.sqrt(len(own)):.4f}")


def row_of(folder: Path, table: str, split: int) -> dict[str, Any]:
    """One split: test rows and how many of them intervals hold, over all and by fifths."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with np.load(folder / f"{table}-{split}.npz") as file:
        x, y, x_test, y_test, zero = (file[name] for name in ("x", "y", "x_test", "y_test", "zero"))
    kept = np.random.default_rng(split).permutation(len(x))[:MOST]
    started = time.process_time()
    model = fitted(x[kept], y[kept], float(zero), Recipe(seed=split, fast=True))
    seconds = time.process_time() - started
    found = model(x_test)
    assert found.prediction is not None
    inside = (found.lower <= y_test) & (y_test <= found.upper)
    pieces = found.prediction.evidence.items()
    away = np.max([piece.standardised.numpy() for name, piece in pieces if name != "doubt"], axis=0)
    mean = found.mean
    return {
        "table": table,
        "split": split,
        "train": len(kept),
        "rows": len(inside),
        "inside": int(inside.sum()),
        **{
            name: [[len(part), int(part.sum())] for part in np.array_split(inside[by.argsort(kind="stable")], 5)]
            for name, by in (("by prediction", mean), ("by distance", away))
        },
        "width": round(float((found.upper - found.lower).mean()), 4),
        "rmse": round(float(np.sqrt(np.mean((mean - y_test) ** 2))), 5),
        "cpu_seconds": round(seconds, 1),
    }


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = ",\n  ".join(json.dumps(row) for row in sorted(rows, key=lambda row: (row["table"], row["split"])))
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps({"experiment": "table-intervals", "level": LEVEL, "environment": environment()})[:-1]
    write_text(path, f'{head}, "rows": [\n  {lines}\n]}}\n')


if __name__ == "__main__":
    main()
