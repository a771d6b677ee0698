"""Nearest neighbours: ours beside faiss and scikit-learn, over the number of training points, and among ten million.

Run: python benchmarks/neighbors.py [sizes] [scaling] [large] [--runs 5] [--points 10000000] [--out FILE]

Every part writes its own rows of the file; without a part all three run. Runs are interleaved, so that what else the
machine does falls on all alike; ratios are of processor time (all threads) and of the clock.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import sklearn
import torch
from sklearn.neighbors import NearestNeighbors
from stream_memory import anonymous_peak
from torch import Tensor, nn

import dapcal
from dapcal.distances import IVF, Distance, NearestNeighbor, OnDisk, Space, TorchIndex
from dapcal.distances.projectors import Identity
from dapcal.experiments.records import environment
from dapcal.files import write_text
from dapcal.likelihoods import Categorical
from dapcal.posteriors import laplace

SIZES = [(10_000, 60_000, 64), (10_000, 60_000, 784), (65_536, 8_000, 40), (1_000, 500_000, 64), (1, 8_000, 40)]
SCALING = [10_000, 100_000, 1_000_000]
DIMENSION = 64

Search = Callable[[Tensor], np.ndarray]
"""From queries (N, P) to the index of the nearest point, (N,)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"what to measure, of {', '.join(PARTS)}; by default all")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--share", type=float, default=1.0, help="of the queries, where time is short")
    parser.add_argument("--points", type=int, default=10_000_000)
    parser.add_argument("--exact", type=int, default=10_000, help="queries of the large part that are searched exactly")
    parser.add_argument("--lists", type=int, help="of the large part; by default the square root of the points")
    parser.add_argument("--out", type=Path, default=Path("results/neighbors.json"))
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"Expected parts among {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    result = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    for part in options.parts or PARTS:
        result |= {"experiment": "neighbors", "environment": _environment(), part: PARTS[part](options)}
        write_text(options.out, json.dumps(result, indent=1) + "\n")


def sizes(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a size: seconds of each, and ours over the others."""
    rows = []
    for queries, points, dimension in SIZES:
        train, asked = normal(points, dimension), normal(math.ceil(options.share * queries), dimension, seed=1)
        ways = {name: partial(build(train), asked) for name, build in INDEXES.items()}
        took = _interleaved(ways, options.runs if queries > 1 else 100 * options.runs)
        row: dict[str, Any] = {"queries": len(asked), "points": points, "dimension": dimension}
        row["ms"] = {
            name: round(1000 * statistics.median(clock for clock, _ in runs), 3) for name, runs in took.items()
        }
        for name in ("faiss", "sklearn"):
            row[f"over_{name}"] = _ratios(took["dapcal"], took[name])
        print(row, flush=True)
        rows.append(row)
    return rows


def _dapcal(points: Tensor) -> Search:
    index = TorchIndex(points)
    return lambda asked: index.query(asked, 1)[1][:, 0].numpy()


def _faiss(points: Tensor) -> Search:
    flat = faiss.IndexFlatL2(points.shape[1])
    flat.add(points.numpy())
    return lambda asked: flat.search(asked.numpy(), 1)[1][:, 0]


def _sklearn(points: Tensor) -> Search:
    brute = NearestNeighbors(n_neighbors=1, algorithm="brute").fit(points.numpy())
    return lambda asked: brute.kneighbors(asked.numpy())[1][:, 0]


INDEXES: dict[str, Callable[[Tensor], Search]] = {"dapcal": _dapcal, "faiss": _faiss, "sklearn": _sklearn}


def scaling(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds a query over the number of points, and the slope on logarithmic axes."""
    rows = []
    asked = clustered(500, seed=1)
    for points in SCALING:
        train = clustered(points)
        exact, lists = TorchIndex(train), IVF()(train)
        ways = {"exact": lambda exact=exact: exact.query(asked, 1), "IVF": lambda lists=lists: lists.query(asked, 1)}
        took = _interleaved(ways, options.runs)
        rows.append({"points": points, "recall": _recall(lists, exact, asked), "probes": lists.probes})
        rows[-1] |= {n: round(1000 * statistics.median(cpu for _, cpu in t) / len(asked), 4) for n, t in took.items()}
        print(rows[-1], flush=True)
    slopes = {name: round(_slope([(row["points"], row[name]) for row in rows]), 2) for name in ("exact", "IVF")}
    return {"unit": "ms of processor time a query, 500 at a time", "rows": rows, "slopes": slopes}


def large(options: argparse.Namespace) -> dict[str, Any]:
    """Ten million points of 64 numbers: an index built, saved, loaded and asked."""
    with tempfile.TemporaryDirectory() as folder:
        train = _mapped(Path(folder) / "points", options.points)
        asked = clustered(10_000, seed=1)
        result: dict[str, Any] = {"points": options.points, "dimension": DIMENSION, "gigabytes": train.nbytes / 1e9}
        timed = _Timed(result)
        lists = timed("build", lambda: OnDisk(Path(folder) / "lists", IVF(options.lists))(train))
        result |= {"lists": len(lists.lists.centers), "probes": lists.probes, "note": lists.note}
        found = timed("approximate_10000", lambda: lists.query(asked, 1))
        timed("approximate_1", lambda: lists.query(asked[:1], 1))
        exact = TorchIndex(train)
        nearest = timed(f"exact_{options.exact}", lambda: exact.query(asked[: options.exact], 1))
        timed("exact_1", lambda: exact.query(asked[:1], 1))
        result["recall"] = float((found[1][: options.exact] == nearest[1]).double().mean())
        excess = (found[0][: options.exact] / nearest[0] - 1).double()
        result["excess_99"] = float(excess.quantile(0.99))
        result["never_too_small"] = bool((excess >= 0).all())
        path, network = Path(folder) / "model.dap", nn.Linear(DIMENSION, 3)
        calibrated = _around(lists, network)
        timed("save", lambda: calibrated.save(path))
        result["file_gigabytes"] = path.stat().st_size / 1e9
        loaded = timed("load", lambda: dapcal.load(path, network))
        again = loaded.distance.spaces[0].metric.index.query(asked[:100], 1)
        result["same_after_loading"] = bool(torch.equal(again[0], found[0][:100]))
    return result


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {"sizes": sizes, "scaling": scaling, "large": large}


class _Timed:
    """Calls functions, and notes the seconds and the memory that they took."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.result = result

    def __call__(self, name: str, function: Callable[[], Any]) -> Any:
        start, cpu = time.perf_counter(), time.process_time()
        with anonymous_peak() as peak:
            value = function()
        self.result[name] = {
            "seconds": round(time.perf_counter() - start, 3),
            "processor_seconds": round(time.process_time() - cpu, 3),
            "anonymous_gigabytes_peak": round(peak[0] / 1e3, 2),
        }
        print(name, self.result[name], flush=True)
        return value


def _around(index: Any, network: nn.Module) -> dapcal.Calibrated:
    """A calibrated posterior whose distance asks this index."""
    x = clustered(400)
    data = x, torch.arange(400) % 3
    posterior = laplace.last_layer(network, Categorical(), data)
    calibrated = dapcal.calibrate(
        posterior, train=data, held_out=(clustered(200, seed=2), data[1][:200]), distance=Space(Identity())
    )
    (space,) = calibrated.distance.spaces
    metric = NearestNeighbor(index, 1, "max")
    return replace(calibrated, distance=Distance((replace(space, metric=metric),)))


def _interleaved(ways: dict[str, Callable[[], Any]], runs: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of the clock and of the processor, each way in turn; the first time does not count."""
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for run in range(runs + 1):
        for name, function in ways.items():
            start, cpu = time.perf_counter(), time.process_time()
            function()
            if run:
                took[name].append((time.perf_counter() - start, time.process_time() - cpu))
    return took


def _ratios(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> dict[str, float]:
    clock = [own[0] / other[0] for own, other in zip(ours, theirs, strict=True)]
    cpu = statistics.median(own for _, own in ours) / statistics.median(other for _, other in theirs)
    return {
        "clock": round(statistics.median(clock), 3),
        "least": round(min(clock), 3),
        "most": round(max(clock), 3),
    } | {"processor": round(cpu, 3)}


def _recall(index: Any, exact: TorchIndex, asked: Tensor) -> float:
    return float((index.query(asked, 1)[1] == exact.query(asked, 1)[1]).double().mean())


def _slope(pairs: list[tuple[float, float]]) -> float:
    """Of the line through the logarithms, by least squares."""
    (slope, _) = statistics.linear_regression(*zip(*((math.log(x), math.log(y)) for x, y in pairs), strict=True))
    return slope


def normal(number: int, dimension: int, seed: int = 0) -> Tensor:
    return torch.randn(number, dimension, generator=torch.Generator().manual_seed(seed))


def clustered(number: int, seed: int = 0) -> Tensor:
    """Points as features lie: 1,000 clusters that vary in ten directions, and a little in all."""
    fixed = torch.Generator().manual_seed(99)
    centers, ways = 3 * torch.randn(1000, 10, generator=fixed), torch.randn(10, DIMENSION, generator=fixed)
    generator = torch.Generator().manual_seed(seed)
    inside = centers[torch.randint(1000, (number,), generator=generator)] + torch.randn(number, 10, generator=generator)
    return inside @ ways + 0.3 * torch.randn(number, DIMENSION, generator=generator)


def _mapped(path: Path, number: int) -> Tensor:
    """Such points in a file that is mapped into memory, made a million at a time."""
    with path.open("wb") as file:
        for part, start in enumerate(range(0, number, 1_000_000)):
            file.write(clustered(min(1_000_000, number - start), seed=100 + part).numpy().data)
    return torch.from_file(str(path), shared=False, size=number * DIMENSION).view(number, DIMENSION)


def _environment() -> dict[str, Any]:
    others = {"faiss": faiss.__version__, "scikit-learn": sklearn.__version__}
    return {**environment("cpu"), **others, "threads": torch.get_num_threads(), "load": round(os.getloadavg()[0], 1)}


if __name__ == "__main__":
    main()
