"""UCI gap in the recipe's way: what tables get from gap cross-validation where their own test rows are missing.

Every split of the five data sets: the middle third of one column is the test set, the rest is fitted by the default
recipe (an ensemble; rows standardised). Log-likelihood of the test rows without adjustment, with the recipe's `fast`
way (Inflate, φ by the rows predicted worst), by default (gap cross-validation chooses none, Inflate or Revert), and
of no network at all (mean and variance of the training targets). The test rows choose nothing.

Run: DAPCAL_DATA=<folder> python benchmarks/gap_recipe.py [folder] [--sets naval,energy] [--jobs 2]
It goes on where an earlier run in the same environment stopped, split by split; `--again` forgets those of its sets.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapcal.experiments.checkout import NOT_RECORDED
from dapcal.experiments.datasets import uci
from dapcal.experiments.parallel import processes
from dapcal.experiments.records import environment, one_thread
from dapcal.files import write_text
from dapcal.likelihoods import Gaussian
from dapcal.recipes import Recipe, fit

SETS = ("boston", "concrete", "energy", "wine", "naval")
WAYS = ("no network", "none", "fast", "default")


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("folder", nargs="?", type=Path, default=Path("build"))
    asked.add_argument("--sets", default=",".join(SETS))
    asked.add_argument("--jobs", type=int, default=2)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--again", action="store_true")
    options = asked.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    path, started = options.folder / "gap-recipe.json", time.perf_counter()
    rows, before = earlier(path, options.seed, options.sets.split(",") if options.again else [])
    known = {(row["set"], row["split"]) for row in rows}
    every = [(name, split) for name in options.sets.split(",") for split in range(len(uci(name).splits))]
    with processes(options.jobs) as submit:
        calls = [submit(row_of, *job, options.seed) for job in every if job not in known]
        for call in calls:
            rows.append(call.result())
            print(json.dumps(rows[-1]), flush=True)
            write(path, options.seed, rows, before + time.perf_counter() - started)
    summary = summary_of(rows)
    print(f"{'':10}" + "".join(f"{way:>18}" for way in WAYS))
    for name, means in summary.items():
        print(f"{name:10}" + "".join(f"{means[way][0]:>10.3f} ± {means[way][1]:<5.2f}" for way in WAYS))


def earlier(path: Path, seed: int, forgotten: list[str]) -> tuple[list[dict[str, Any]], float]:
    """Splits that a run with the same seed and environment has done, but for some sets, and its seconds."""
    found = json.loads(path.read_text()) if path.exists() else None
    if found is None or (found["seed"], _machine(found["environment"])) != (seed, _machine(environment())):
        return [], 0.0
    return [row for row in found["rows"] if row["set"] not in forgotten], found["seconds"]


def _machine(made_on: dict[str, str]) -> dict[str, str]:
    """All but the commit, which may move on while splits are made."""
    return {name: value for name, value in made_on.items() if name != "commit"}


def write(path: Path, seed: int, rows: list[dict[str, Any]], seconds: float) -> None:
    before, now = json.loads(path.read_text()) if path.exists() else None, environment()
    if before is not None and earlier(path, seed, [])[0]:  # that this run goes on with
        commits = [*before["environment"].get("commit", NOT_RECORDED).split("; "), now["commit"]]
        now["commit"] = "; ".join(dict.fromkeys(commits))
    result = {
        "experiment": "gap-recipe",
        "seed": seed,
        "environment": now,
        "summary": summary_of(rows),
        "rows": sorted(rows, key=lambda row: (SETS.index(row["set"]), row["split"])),
        "seconds": round(seconds, 1),
    }
    write_text(path, json.dumps(result, indent=1) + "\n")


def summary_of(rows: list[dict[str, Any]]) -> dict[str, dict[str, tuple[float, float]]]:
    return {
        name: mean_of([row for row in rows if row["set"] == name])
        for name in SETS
        if any(row["set"] == name for row in rows)
    }


@one_thread()
def row_of(name: str, split: int, seed: int) -> dict[str, Any]:
    """One split, fitted in both ways."""
    table = uci(name)
    test = table.splits[split]
    rows = torch.ones(len(table.x), dtype=torch.bool)
    rows[test] = False
    x, _ = standardised(table.x, rows)
    y, unit = standardised(table.y[:, None], rows)
    shift = math.log(float(unit))
    row: dict[str, Any] = {"set": name, "split": split, "column": table.columns[split]}
    row["no network"] = float(torch.distributions.Normal(0.0, 1.0).log_prob(y[test]).mean()) - shift
    for way in ("fast", "default"):
        fitted = fit(x[rows], y[rows], Gaussian(), 1, Recipe(seed=seed, fast=way == "fast"))
        prediction = fitted.calibrated(x[test])
        row["none"] = float(prediction.base.log_prob(y[test]).mean()) - shift
        row[way] = float(prediction.log_prob(y[test]).mean()) - shift
        row[f"{way} RMSE"] = float((prediction.mean - y[test]).square().mean().sqrt() * unit)
        row[f"{way} phi"] = fitted.calibrated.phi
        if fitted.gaps is not None:
            row["chosen"] = fitted.gaps.chosen
    return row


def standardised(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """By mean and deviation of some rows, and that deviation."""
    deviation = values[rows].std(0, correction=0)
    deviation = torch.where(deviation > 0, deviation, 1.0)
    return ((values - values[rows].mean(0)) / deviation).float(), deviation


def mean_of(rows: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Mean and standard error over splits."""
    found = {}
    for way in WAYS:
        values = torch.tensor([row[way] for row in rows], dtype=torch.float64)
        found[way] = float(values.mean()), float(values.std() / math.sqrt(len(values)))
    return found


if __name__ == "__main__":
    main()
