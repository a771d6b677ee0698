"""Runs a task of images: seeds in parallel, every row once, and what is finished is taken over."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dapcal.experiments.images.bench import Bench, ImageTask
from dapcal.experiments.images.measurement import make_row
from dapcal.experiments.images.methods import PARTS, methods
from dapcal.experiments.parallel import looks, processes
from dapcal.experiments.records import Outcome, Run, environment
from dapcal.files import remove_parts, write_text

SEEDS = 5
DRAWN = ("MAP", "ODIN", "DDU", "DE", "VI", "DAP, paper's", "DAP, ours")  # rows whose curves are kept


def run_task(name: str, task: ImageTask, this: Run) -> Outcome:
    """All seeds of a task; rows that are finished already are read back."""
    seeds = range(this.seed, this.seed + (SEEDS if this.seeds is None else this.seeds))
    rows = {seed: _rows(task, this, is_first=seed == this.seed) for seed in seeds}
    Bench.look_for_data(task)
    total = sum(len(names) for names in rows.values())
    told: set[Path] = set()

    def tell() -> None:
        for path in sorted(this.work.glob("seed-*/row-*.json")):
            if path not in told:
                told.add(path)
                this.say(f"{name}, {path.parent.name}: {json.loads(path.read_text(encoding='utf-8'))['row']}")
        this.progress("methods and seeds", len(told), total)

    threads = max(1, torch.get_num_threads() // this.jobs)
    places = [(task, seed, this.work / f"seed-{seed}", this.device, threads) for seed in seeds]
    with processes(this.jobs, this.elsewhere) as submit:
        for stage in Bench.stages(task, this.parts) if this.jobs > 1 else []:  # else rows train what they need
            for _ in looks([submit(_train, *place, name) for name in stage for place in places]):
                tell()
        here = (tell,) if this.jobs == 1 else ()
        for _ in looks([submit(_make_rows, *place, rows[place[1]], *here) for place in places]):
            tell()
    tell()
    numbers = {
        "experiment": name,
        "seeds": list(seeds),
        "environment": environment(this.device),
        "settings": settings(task),
        "parts": {row: method.part for row, method in methods(task.outside).items()},
        "main_scores": {row: method.score for row, method in methods(task.outside).items()},
        "runs": [
            {"seed": seed, "rows": read_rows(this.work / f"seed-{seed}", rows[seed], seed == this.seed)}
            for seed in seeds
        ],
    }
    return Outcome(numbers, [])


def settings(task: ImageTask) -> dict[str, Any]:
    """A task in plain words, for the result file."""
    return {**asdict(task), "network": task.network.__doc__, "sigma0": 1.0, "kl_weight": 1.0}


def _train(task: ImageTask, seed: int, work: Path, device: str, threads: int, name: str) -> None:
    """One training run, for its checkpoint."""
    torch.set_num_threads(threads)
    Bench(task, seed, work, device).fit(name)


def _make_rows(
    task: ImageTask,
    seed: int,
    work: Path,
    device: str,
    threads: int,
    names: list[str],
    tell: Callable[[], None] = lambda: None,
) -> None:
    """The rows of one seed that are not there yet, one file each."""
    torch.set_num_threads(threads)
    work.mkdir(parents=True, exist_ok=True)
    remove_parts(work)
    bench: Bench | None = None
    for name in names:
        path = row_path(work, name)
        if not path.exists():
            bench = bench or Bench(task, seed, work, device)
            write_text(path, json.dumps({"row": name, **_row(name, bench)}))
        tell()


def _rows(task: ImageTask, this: Run, is_first: bool) -> list[str]:
    """Networks that are trained for it are dear: the first seed alone has them, unless all is wanted."""
    known = methods(task.outside)
    check_parts(this.parts, {method.part for method in known.values()})
    return [
        row for row, method in known.items()
        if (this.parts is None or method.part in this.parts) and (this.full or is_first or method.part != "trained")
    ]  # fmt: skip


def check_parts(parts: Iterable[str] | None, known: Collection[str]) -> None:
    """Refuse parts that the table does not have."""
    unknown = sorted(set(parts or ()).difference(known))
    if unknown:
        raise ValueError(
            f"Expected parts among {', '.join(part for part in PARTS if part in known)}, got {', '.join(unknown)}"
        )


def row_path(work: Path, row: str) -> Path:
    """The file of a row in the folder of its seed."""
    return work / f"row-{re.sub('[^a-z0-9φ+]+', '-', row.lower()).strip('-')}.json"


def read_rows(work: Path, names: Iterable[str], curves: bool) -> dict[str, Any]:
    """Finished rows; curves of the first seed and of the rows that are drawn are enough for the figures."""
    found = {}
    for name in names:
        row = json.loads(row_path(work, name).read_text(encoding="utf-8"))
        if not curves or name not in DRAWN:
            row.pop("curves", None)
            row["facts"].pop("curve", None)
        found[row.pop("row")] = row
    return found


def _row(name: str, bench: Bench) -> dict[str, Any]:
    return make_row(methods(bench.task.outside)[name], bench, curves=name in DRAWN)
