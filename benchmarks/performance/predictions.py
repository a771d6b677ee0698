"""`dapcal predict` from Parquet and CSV, beside what its searches by faiss and its bare networks take."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import torch
from predict_large import dapcal
from service import NAMES, ROWS, fitted
from torch import Tensor

from dapcal.distances.neighbors import TorchIndex
from dapcal.experiments.performance import Limit, Row
from dapcal.models import load
from performance.members import network
from performance.turns import in_turns

__all__ = ["rows"]

FLOOR = "faiss searches and bare networks"
MEMBERS, AT_ONCE = 5, 8192
KEPT = 500  # rows that distances are measured from, where not all are


def rows(repeats: int, small: bool) -> list[Row]:
    count = 20_000 if small else 50_000
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model, fewer = fitted(folder), fitted(folder, "--points", str(KEPT))
        for name, size in {"few": 10, "many": count}.items():
            write(folder / name, size)
        searches = searched(model, folder / "few.csv", count)
        ways: dict[str, Callable[[], object]] = {
            "parquet": partial(predict, model, folder / "many.parquet"),
            "csv": partial(predict, model, folder / "many.csv"),
            "fewer": partial(predict, fewer, folder / "many.parquet"),
            "start": partial(predict, model, folder / "few.parquet"),
            FLOOR: floor(searches, count),
        }
        quality = next(note for note in load(fewer).calibrated.notes if f"{KEPT:,} of" in note)
        found = in_turns(ways, repeats, warm=False)  # processes, which start cold anyway
    rate = {FLOOR: [count / took for took in found[FLOOR]]}
    start = min(found["start"])
    for way in ("parquet", "csv", "fewer"):
        if min(found[way]) <= start:
            raise RuntimeError(f"{count:,} rows took no longer than ten of them; the machine is too busy to tell")
        rate[way] = [count / (took - start) for took in found[way]]
    shapes = ", ".join(f"{len(points):,} × {points.shape[1]}" for points, _, _ in searches)
    note = f"searches among {shapes} points; the start of the process, {start:.1f} s at least, is not counted"
    name = f"{count:,} rows × {len(NAMES)}, model of {ROWS:,} rows"
    return [
        Row(f"{name}, Parquet", "rows/s", rate["parquet"], FLOOR, rate[FLOOR], Limit(0.7, least=True), note=note),
        Row(f"{name}, CSV", "rows/s", rate["csv"], "the same from Parquet", rate["parquet"], Limit(0.6, least=True)),
        Row(
            f"{name}, Parquet, distances from {KEPT} of them",
            "rows/s",
            rate["fewer"],
            limit=Limit(100_000, "ours", least=True),
            note=quality,
        ),
    ]


def predict(model: str, path: Path) -> None:
    dapcal("predict", model, path, "-o", path.with_name(f"out{path.suffix}"))


def write(path: Path, count: int) -> None:
    """The same rows as Parquet and as CSV."""
    columns = np.random.default_rng(0).normal(size=(len(NAMES), count)).round(6)
    table = pa.table(dict(zip(NAMES, columns, strict=True)))
    pyarrow.parquet.write_table(table, path.with_suffix(".parquet"))
    pyarrow.csv.write_csv(table, path.with_suffix(".csv"))


Search = tuple[Tensor, Tensor, int]
"""Points (T, P), some queries (N, P), and how many neighbours of them."""


def searched(model: str, path: Path, count: int) -> list[Search]:
    """What a prediction of `count` rows searches: the queries of a few rows, again and again."""
    loaded, table = load(model), pyarrow.csv.read_csv(path)
    with noted() as searches:
        loaded.predict(table)
    return [(points, queries.repeat(-(-count // len(queries)), 1)[:count], k) for points, queries, k in searches]


@contextmanager
def noted() -> Iterator[list[Search]]:
    found: list[Search] = []
    query = TorchIndex.query

    def telling(index: TorchIndex, points: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
        found.append((index.points, points.to(index.points), k))
        return query(index, points, k)

    TorchIndex.query = telling
    try:
        yield found
    finally:
        TorchIndex.query = query


def floor(searches: list[Search], count: int) -> Callable[[], None]:
    """As many searches by faiss, and passes of as many networks."""
    networks = [network().eval() for _ in range(MEMBERS)]
    x = torch.randn(count, len(NAMES))

    @torch.inference_mode()
    def run() -> None:
        for points, queries, k in searches:
            for batch in queries.split(AT_ONCE):
                faiss.knn(batch.numpy(), points.numpy(), k)
        for batch in x.split(AT_ONCE):
            for own in networks:
                own(batch).softmax(-1)

    return run
