"""A toy experiment under several seeds, in one result file: what is finished is taken over, the first seed is drawn."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from dapcal.experiments.records import Outcome, Picture, Run, environment
from dapcal.files import write_text


class OneSeed(NamedTuple):
    """What one seed gives: numbers for the result file, and how to draw them."""

    numbers: dict[str, Any]
    draw: Callable[[], list[Picture]]


def over_seeds(name: str, settings: dict[str, Any], this: Run, one: Callable[[Run], OneSeed]) -> Outcome:
    """Runs every seed; the first comes last, since its pictures are not kept with unfinished work.

    Curves of the search are kept for the first seed alone.
    """
    started = time.perf_counter()
    seeds = list(range(this.seed, this.seed + (this.seeds or 1)))
    found = {seed: _further(seed, this, one) for seed in seeds[1:]}
    first_started = time.perf_counter()
    first = one(this)
    pictures = first.draw()
    found[this.seed] = first.numbers | {"seconds": round(time.perf_counter() - first_started, 1)}
    numbers = {
        "experiment": name,
        "seeds": seeds,
        "environment": environment(),
        "settings": settings,
        "runs": [{"seed": seed, **found[seed]} for seed in seeds],
        "seconds": round(time.perf_counter() - started, 1),
    }
    return Outcome(numbers, pictures)


def _further(seed: int, this: Run, one: Callable[[Run], OneSeed]) -> dict[str, Any]:
    path = this.work / f"seed-{seed}.json"
    if not path.exists():
        started = time.perf_counter()
        numbers = dict(one(replace(this, seed=seed)).numbers)
        for who in ("ours", "paper"):
            numbers[who] = {key: value for key, value in numbers[who].items() if key != "curve"}
        numbers["seconds"] = round(time.perf_counter() - started, 1)
        this.work.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(numbers))
        this.say(f"seed {seed}: {numbers['seconds']:g} s")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
