"""No harm: data sets and posteriors, before and after `dapcal.calibrate` with all defaults."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

from dapcal.experiments.no_harm.cases import Case, Plan
from dapcal.experiments.no_harm.measuring import measure
from dapcal.experiments.no_harm.summary import verdict
from dapcal.experiments.parallel import looks, processes
from dapcal.experiments.records import Experiment, Outcome, Run, environment, one_thread, short, with_leaves
from dapcal.files import remove_parts, write_text


def run(this: Run) -> Outcome:
    """Train, calibrate and measure every case under all of its seeds, over several processes."""
    return run_plan(Plan(), this)


def run_plan(plan: Plan, this: Run) -> Outcome:
    """The experiment with another plan; what an interrupted run has finished is taken over."""
    started = time.perf_counter()
    this.work.mkdir(parents=True, exist_ok=True)
    remove_parts(this.work)
    cases = plan.chosen(this.parts, this.seeds)
    pairs = [(case, this.seed + seed) for case in cases for seed in case.seeds]
    with processes(this.jobs, this.elsewhere) as submit:
        calls = [submit(_one, plan, case, seed, this.work) for case, seed in pairs]
        done = 0
        for finished in looks(calls):
            for call in finished:
                done += 1
                this.say(call.result())
                this.progress("cases and seeds", done, len(pairs))
    records: dict[str, list[dict[str, Any]]] = {}
    for case, seed in pairs:
        records.setdefault(case.name, []).append(json.loads(_path(case, seed, this.work).read_text(encoding="utf-8")))
    seconds = [sum(record["seconds"].values()) for own in records.values() for record in own]
    return Outcome(
        {
            "experiment": "no-harm",
            "seed": this.seed,
            "environment": environment(),
            "settings": plan.settings,
            "verdict": verdict(records),
            "cases": records,
            "processor_seconds": round(sum(seconds), 1),  # of all, also those before an interruption
            "jobs": this.jobs,
            "seconds": round(time.perf_counter() - started, 1),
        },
        [],
    )


@one_thread()
def _one(plan: Plan, case: Case, seed: int, work: Path) -> str:
    path = _path(case, seed, work)
    if not path.exists():
        record = measure(plan.of(case.data), case.posterior, seed)
        write_text(path, json.dumps(with_leaves(record, short), ensure_ascii=False) + "\n")
    found = json.loads(path.read_text(encoding="utf-8"))
    nll = " → ".join(f"{found[side]['nll']:.3f}" for side in ("before", "after"))
    aurocs = ", ".join(
        " → ".join(f"{100 * own[side]['auroc']:.1f}" for side in ("before", "after"))
        for own in found["outliers"].values()
    )
    return f"{case.name}, seed {seed}: NLL {nll}; AUROC {aurocs}"


def _path(case: Case, seed: int, work: Path) -> Path:
    return work / f"{re.sub('[^a-zA-Z0-9]+', '-', case.name)}-{seed}.json"


EXPERIMENT = Experiment(
    title="No harm",
    text="Small networks and six kinds of posterior on images, tables and toys: accuracy, likelihood, calibration and "
    "detection of outliers before and after dapcal.calibrate with all defaults. Cases, seeds and outliers were written "
    "down before the first run.",
    run=run,
    options=("seeds", "parts", "jobs"),
    settings=Plan().settings,
)
