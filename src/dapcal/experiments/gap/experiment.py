"""UCI gap: five data sets whose test rows lie in the middle third of one feature, left out of training (paper, 5.2)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file

from dapcal.experiments.gap.evaluation import evaluate
from dapcal.experiments.gap.summary import summarise
from dapcal.experiments.gap.training import Plan, prepare, train
from dapcal.experiments.parallel import looks, processes
from dapcal.experiments.published import UCI_GAP
from dapcal.experiments.records import Experiment, Outcome, Run, environment, one_thread, short, with_leaves
from dapcal.files import complete_or_absent, remove_parts, write_text


class Unit(NamedTuple):
    """Some splits of a data set under one seed: what is trained together."""

    table: str
    splits: tuple[int, ...]
    seed: int

    def networks(self, work: Path) -> Path:
        """Where the trained networks go."""
        return work / f"seed-{self.seed}-{self.table}-{self.splits[0]}.safetensors"

    def record(self, split: int, work: Path) -> Path:
        """Where the numbers of one split go."""
        return work / f"seed-{self.seed}-{self.table}-{split}.json"


def run(this: Run) -> Outcome:
    """Train and evaluate all splits, over several processes; what an interrupted run has finished is taken over."""
    return run_plan(Plan(), this)


def run_plan(plan: Plan, this: Run) -> Outcome:
    """The experiment with another plan."""
    started = time.perf_counter()
    this.work.mkdir(parents=True, exist_ok=True)
    remove_parts(this.work)
    counts = {name: len(plan.load(name).splits) for name in plan.tables}
    seeds = list(range(this.seed, this.seed + (this.seeds or 1)))
    units = [
        Unit(name, tuple(range(first, min(first + plan.together, count))), seed)
        for seed in seeds for name, count in counts.items() for first in range(0, count, plan.together)
    ]  # fmt: skip
    records = _records(plan, this, units)
    return Outcome(
        {
            "experiment": "uci-gap",
            "seeds": seeds,
            "environment": environment(),
            "settings": plan.settings,
            "published": UCI_GAP,
            "summary": summarise(records),
            "splits": records,
            "seconds": round(time.perf_counter() - started, 1),
        },
        [],
    )


def _records(plan: Plan, this: Run, units: list[Unit]) -> list[dict[str, Any]]:
    """One record for each split, in the order of the units; the largest data sets are trained first."""
    total, done = sum(len(unit.splits) for unit in units), 0
    with processes(this.jobs, this.elsewhere) as submit:
        trainings = {
            submit(_train, plan, unit, this.work): unit
            for unit in sorted(units, key=lambda unit: (unit.seed, -len(plan.load(unit.table).x)))
        }
        calls = list(trainings)
        for finished in looks(calls):
            for call in finished:
                if call in trainings:
                    unit = trainings[call]
                    calls += [submit(_evaluate, plan, unit, own, this.work) for own in unit.splits]
                    continue
                done += 1
                this.say(call.result())
                this.progress("splits", done, total)
    return [json.loads(unit.record(own, this.work).read_text()) for unit in units for own in unit.splits]


@one_thread()
def _train(plan: Plan, unit: Unit, work: Path) -> str:
    path = unit.networks(work)
    if path.exists():
        return f"{path.name}: taken over"
    table = plan.load(unit.table)
    splits = [prepare(plan, table, split, unit.seed) for split in unit.splits]
    networks = train(plan, splits, unit.splits, unit.seed)
    with complete_or_absent(path) as part:
        save_file({name: value.contiguous() for name, value in networks.items()}, part)
    return f"{path.name}: trained"


@one_thread()
def _evaluate(plan: Plan, unit: Unit, split: int, work: Path) -> str:
    path, seed = unit.record(split, work), unit.seed
    if not path.exists():
        table = plan.load(unit.table)
        place = unit.splits.index(split)
        networks = {name: value[place] for name, value in load_file(unit.networks(work)).items()}
        record = {
            "table": unit.table,
            "seed": seed,
            "split": split,
            "column": table.columns[split],
            "constant": bool((table.x[:, split] == table.x[0, split]).all()),
            "rows": with_leaves(evaluate(plan, prepare(plan, table, split, seed), networks, seed), short),
        }
        write_text(path, json.dumps(record) + "\n")
    rows = json.loads(path.read_text())["rows"]
    shown = ", ".join(f"{name} {rows[name]['log_likelihood']:.2f}" for name in ("VI", "VI + paper", "VI + ours"))
    return f"{unit.table} {split}, seed {seed}: {shown}"


EXPERIMENT = Experiment(
    title="UCI gap",
    text="Five regression data sets, one split for each feature: networks learn the lowest and highest third by that "
    "feature and are asked about the middle. A 50-50 ReLU network with a standard-normal prior and one noise level; "
    "learning rate and epochs by held-out log-likelihood; test log-likelihood in the target's units.",
    run=run,
    options=("seeds", "jobs"),
    settings=Plan().settings,
)
