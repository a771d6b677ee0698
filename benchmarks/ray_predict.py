"""Rows of a Parquet file on three nodes of Ray on this machine, beside one process with the same cores; and an index.

Rows per second, processor time, peak memory of every node, and whether the bytes are the same; then neighbours among
points in three shards, beside one index.

Each part writes its own rows of the file.

Run: python benchmarks/ray_predict.py [--only rows] [--rows 20000000] [--points 20000000] [--out results/ray.json]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch

from dapcal.distances.neighbors import TorchIndex
from dapcal.distances.spread import Spread
from dapcal.engines.ray import connected
from dapcal.experiments.records import environment
from dapcal.files import write_text

NODES = 3
COLUMNS = 20
TRAINING = 2000
STORE = 512 * 2**20  # bytes of a node's object store
TICK = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["rows", "index"], help="of the two parts; by default both")
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--points", type=int, default=20_000_000)
    parser.add_argument("--out", type=Path, default=Path("results/ray.json"))
    options = parser.parse_args()
    load = round(os.getloadavg()[0], 1)  # of others, before anything here runs
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_worker_niceness": "0",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    found = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {"experiment": "ray"}
    for part in [options.only] if options.only else ["rows", "index"]:  # each is written when it is there
        if part == "rows":
            own = {"environment": {**environment(), "cores": len(os.sched_getaffinity(0)), "load": load}}
            found |= own | predictions(options.rows)
        else:
            with three_nodes() as address:
                found["index"] = index(options.points, address)
        write_text(options.out, json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def predictions(rows: int) -> dict[str, object]:
    """Rows of a file by one process, and by three nodes."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        table(TRAINING, 0, target=True, path=folder / "train.parquet")
        table(rows, 1, target=False, path=folder / "rows.parquet")
        fit = ["fit", folder / "train.parquet", "--target", "y", "-o", folder / "m.dap", "--fast", "--epochs", "10"]
        command(*fit)
        asked = ["predict", folder / "m.dap", folder / "rows.parquet", "-o"]
        one = measured(lambda: command(*asked, folder / "one.parquet"))
        print(f"one process: {one}", flush=True)
        with three_nodes() as address:
            words = ["--engine", "ray", "--address", address]
            with Watch() as watch:
                three = measured(lambda: command(*asked, folder / "three.parquet", *words))
        three["processor_seconds"] += watch.processor_seconds()
        print(f"three nodes: {three}", flush=True)
        return {
            "rows": rows,
            "columns": COLUMNS,
            "training_rows": TRAINING,
            "one_process": one,
            "three_nodes": three,
            "overhead_seconds": three["seconds"] / one["seconds"],
            "overhead_processor": three["processor_seconds"] / one["processor_seconds"],
            "node_peak_mib": watch.peaks(),
            "same_bytes": digest(folder / "one.parquet") == digest(folder / "three.parquet"),
        }


def table(rows: int, seed: int, target: bool, path: Path) -> None:
    """Numbers, some of them far from those of training."""
    random, writer = np.random.default_rng(seed), None
    for start in range(0, rows, 2**20):
        count = min(2**20, rows - start)
        x = random.normal(size=(count, COLUMNS)).astype(np.float32)
        x[random.random(count) < 0.02] += 4
        columns = {f"x{place}": x[:, place] for place in range(COLUMNS)}
        if target:
            columns["y"] = x[:, 0] + np.sin(3 * x[:, 1]) + 0.1 * random.normal(size=count)
        content = pa.table(columns)
        writer = writer or pyarrow.parquet.ParquetWriter(path, content.schema)
        writer.write_table(content)
    writer.close()


def command(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "dapcal", *map(str, words), "--quiet"], check=True)


def measured(call) -> dict[str, float]:
    """Seconds, and processor seconds of the processes that it waited for."""
    before, started = os.times(), time.perf_counter()
    call()
    after, seconds = os.times(), time.perf_counter() - started
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": round(seconds, 2), "processor_seconds": round(used, 2)}


@contextmanager
def three_nodes() -> Iterator[str]:
    """Address of a cluster that ends with the block."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False}
    )
    try:
        for _ in range(NODES - 1):
            cluster.add_node(num_cpus=1, object_store_memory=STORE)
        yield cluster.address
    finally:
        ray.shutdown()  # a node that this process is connected to is not removed
        cluster.shutdown()


class Watch:
    """Memory and processor time of the nodes' processes, looked at twice a second."""

    def __enter__(self) -> Watch:
        self.most: dict[int, int] = {}  # raylet: pages of it and its children, at most
        self.used: dict[int, list[float]] = {}  # process: seconds at first, and at last
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    def look(self) -> None:
        while not self.ended.wait(0.5):
            processes = dict(filter(None, map(_process, Path("/proc").glob("[0-9]*"))))
            raylets = {number for number, (name, *_) in processes.items() if name == "raylet"}
            for raylet in raylets:
                own = {n: p for n, p in processes.items() if n == raylet or p[1] == raylet}
                self.most[raylet] = max(self.most.get(raylet, 0), sum(p[3] for p in own.values()))
                for number, (_, _, seconds, _) in own.items():
                    self.used.setdefault(number, [0.0 if number not in raylets else seconds, seconds])[1] = seconds

    def processor_seconds(self) -> float:
        return round(sum(last - first for first, last in self.used.values()), 2)

    def peaks(self) -> list[float]:
        return [round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20) for pages in self.most.values()]


def _process(path: Path) -> tuple[int, tuple[str, int, float, int]] | None:
    """Name, parent, processor seconds and pages in memory that are its own."""
    try:
        name, _, rest = (path / "stat").read_text().partition("(")[2].rpartition(")")
        fields = rest.split()
        resident, shared = (int(pages) for pages in (path / "statm").read_text().split()[1:3])
        return int(path.name), (name, int(fields[1]), (int(fields[11]) + int(fields[12])) / TICK, resident - shared)
    except (OSError, ValueError):  # ended meanwhile
        return None


def index(count: int, address: str) -> dict[str, object]:
    """Neighbours of some queries among points in three shards and in one index."""
    generator = torch.Generator().manual_seed(0)
    points, queries = torch.randn(count, 8, generator=generator), torch.randn(64, 8, generator=generator)
    whole, engine = TorchIndex(points), connected(address)
    spread = Spread(engine, points)
    spread.nearest(engine, whole, queries[:1], 5)  # hands out the shards
    started = time.perf_counter()
    here = whole.query(queries, 5)
    between = time.perf_counter()
    there = spread.nearest(engine, whole, queries, 5)
    ended = time.perf_counter()
    engine.release()
    same = all(torch.equal(one, two) for one, two in zip(here, there, strict=True))
    return {
        "points": count,
        "queries": len(queries),
        "neighbors": 5,
        "shards": NODES,
        "one_index_seconds": round(between - started, 3),
        "shards_seconds": round(ended - between, 3),
        "same_bits": same,
    }


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
