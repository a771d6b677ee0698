"""Runs the CIFAR-10 experiment unit by unit, in as many parts as it takes; what is finished is taken over.

A result file that is not finished is taken over too, so that the next part can be made on another machine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dapcal.experiments.cifar.bench import PhotoBench
from dapcal.experiments.cifar.keeping import keep_features, keep_scores
from dapcal.experiments.cifar.pictures import Photographs, photographs
from dapcal.experiments.cifar.rows import Unit, chosen, table, units
from dapcal.experiments.cifar.task import PhotoTask, plan, task_for
from dapcal.experiments.cifar.training import Clock, OutOfTime
from dapcal.experiments.images.measurement import make_row
from dapcal.experiments.images.run import DRAWN, check_parts, read_rows, row_path
from dapcal.experiments.records import Experiment, Outcome, Run, environment, unfinished
from dapcal.files import remove_parts, write_text


def run(this: Run) -> Outcome:
    """With the paper's network on a GPU, with a small one on a CPU."""
    return run_task("cifar10", task_for(this.device), this)


def run_task(name: str, task: PhotoTask, this: Run) -> Outcome:
    """All units of a task until they are done or the minutes are over; rows that are finished are read back."""
    clock = Clock.of(this.minutes)
    known = table()
    check_parts(this.parts, {method.part for method in known.values()})
    task = task if this.seeds is None else replace(task, members=this.seeds)
    todo = chosen(units(task, this.seed, this.full), this.parts)
    if this.kept is not None:
        _take_over(this.kept.with_name(f"{name}.json"), task, this)
    left = [unit for unit in todo if _missing(unit, this.work)]
    data = photographs(task, this.seed, this.device) if left else None
    total = sum(len(unit.rows) for unit in todo)
    try:
        for unit in left:
            clock.check(_needed(unit, todo, this.work))
            assert data is not None
            _make(unit, task, data, this, clock, total)
    except OutOfTime:
        this.say(f"{name}: the minutes are over; the same command goes on")
    rows_left = [f"seed {unit.seed}: {row}" for unit in todo for row in _missing(unit, this.work)]
    numbers = {
        "experiment": name,
        "seeds": list(range(this.seed, this.seed + task.members)),
        "environment": _made_on(todo, this),
        "settings": task.settings,
        "unfinished": rows_left,
        "parts": {row: method.part for row, method in known.items()},
        "main_scores": {row: method.score for row, method in known.items()},
        "runs": [_run_of(seed, todo, this) for seed in range(this.seed, this.seed + task.members)],
    }
    return Outcome(numbers, [], unfinished=len(rows_left))


def _take_over(result: Path, task: PhotoTask, this: Run) -> None:
    """Rows and records of an unfinished result file with the same settings, where the work folder has none."""
    found = unfinished(result)
    if not found or found["settings"] != json.loads(json.dumps(task.settings)):
        return
    for run in found["runs"]:
        folder = _folder(run["seed"], this.work)
        folder.mkdir(parents=True, exist_ok=True)
        texts = {row_path(folder, row): {"row": row, **numbers} for row, numbers in run["rows"].items()}
        texts |= {_record(Unit(unit, run["seed"], ()), this.work): made for unit, made in run["units"].items()}
        for path, told in texts.items():
            if not path.exists():
                write_text(path, json.dumps(told))
    this.say(f"{result.name}: {sum(len(run['rows']) for run in found['runs'])} rows taken over")


def _made_on(todo: Sequence[Unit], this: Run) -> dict[str, str]:
    """Where the first unit was made, and this machine if none is: a run that only reads back makes nothing."""
    paths = [_record(unit, this.work) for unit in todo]
    made = [one for path in paths if path.exists() for one in json.loads(path.read_text(encoding="utf-8"))]
    return made[0]["environment"] if made else environment(this.device)


def _make(unit: Unit, task: PhotoTask, data: Photographs, this: Run, clock: Clock, total: int) -> None:
    """What is missing of a unit: what it trains, then row by row."""
    work = _folder(unit.seed, this.work)
    work.mkdir(parents=True, exist_ok=True)
    remove_parts(work)
    bench = PhotoBench(task, data, unit.seed, this.work / "weights", this.device, clock, this.progress)
    getattr(bench, _TRAINED[unit.name])
    _add_record(unit, this.work, environment(this.device), bench.seconds)
    if unit.name == "network":
        keep_features(bench, this.kept)
    for row in _missing(unit, this.work):
        clock.check()
        method = table()[row]
        found = make_row(method, bench, row in DRAWN, keep_scores(this.kept, unit.seed, row, method.score))
        write_text(row_path(work, row), json.dumps({"row": row, **found}))
        this.say(f"seed {unit.seed}, {unit.name}: {row} ({found['seconds']:g} s)")
        this.progress("rows", len(list(this.work.glob("seed-*/row-*.json"))), total)
    if bench.device.startswith("cuda"):
        del bench
        torch.cuda.empty_cache()


def _add_record(unit: Unit, work: Path, made_on: dict[str, str], seconds: dict[str, float]) -> None:
    """One more time that a unit was worked on: where, and what was trained for it."""
    path = _record(unit, work)
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    write_text(path, json.dumps([*before, {"environment": made_on, "training_seconds": seconds}], indent=1))


def _run_of(seed: int, todo: Sequence[Unit], this: Run) -> dict[str, Any]:
    """All of a seed: rows in the order of the table, and where its units were made."""
    folder, own = _folder(seed, this.work), [unit for unit in todo if unit.seed == seed]
    done = {row for unit in own for row in unit.rows} - {row for unit in own for row in _missing(unit, this.work)}
    rows = read_rows(folder, [row for row in table() if row in done], curves=seed == this.seed)
    records = {unit.name: _record(unit, this.work) for unit in own}
    made = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in records.items() if path.exists()}
    return {"seed": seed, "rows": rows, "units": made}


def _missing(unit: Unit, work: Path) -> list[str]:
    return [row for row in unit.rows if not row_path(_folder(unit.seed, work), row).exists()]


def _needed(unit: Unit, todo: Sequence[Unit], work: Path) -> float:
    """Seconds that the longest training of such a unit took so far; networks themselves stop when they have to."""
    if unit.name in ("network", "spectral"):
        return 0.0
    paths = [_record(other, work) for other in todo if other.name == unit.name]
    records = [one for path in paths if path.exists() for one in json.loads(path.read_text(encoding="utf-8"))]
    return max((sum(one["training_seconds"].values()) for one in records), default=0.0)


def _folder(seed: int, work: Path) -> Path:
    return work / f"seed-{seed}"


def _record(unit: Unit, work: Path) -> Path:
    return _folder(unit.seed, work) / f"unit-{unit.name}.json"


_TRAINED = {
    "network": "map", "ensemble": "ensemble", "variational": "variational", "swag": "swag", "questions": "map",
    "spectral": "spectral",
}  # fmt: skip
"""What a unit trains, as a bench calls it."""

EXPERIMENT = Experiment(
    title="CIFAR-10",
    text="A wide residual network learns photographs (on a CPU a small one, to see that it runs); house numbers, other "
    "photographs, textures and corrupted images should make it unsure.",
    run=run,
    options=("seeds", "device", "parts", "full", "minutes"),
    settings={name: plan()[name] for name in ("settings", "outside", "scoring")},
)
