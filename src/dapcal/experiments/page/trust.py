"""The tables of docs/trust.md: what was tried to break the project, from results/torture.json and wide-tables.json.

Run: python -m dapcal.experiments.page.trust results docs/trust.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dapcal.experiments.page.markers import TABLE_END, replaced, table_begin
from dapcal.files import write_text

NOT_YET = "Not run yet: `{}`."
TRIED = {  # by part: what one try is
    "artefacts": "an artefact damaged, with and without a new checksum, then loaded",
    "checkpoints": "a checkpoint damaged, then gone on from",
    "files": "a table, array, image or file of weights, damaged or nonsense, then read",
    "service": "a request with a known answer, among slow heads, floods, SIGTERM and SIGHUP; memory",
    "kills": "what a command left behind when it was killed, alone or with others that write the same file",
    "states": "a step of a random walk over calibrate, save, load and predict",
    "numerics": "a calibration of numbers from denormals to 1e308",
    "validity": "a refit, for p-values",
    "nodes": "what a cluster's output holds after a node, an actor or the driver was killed",
}

MEASURED = {"memory_growth_percent": " Memory of the service grew by {:.1f} % after a warm-up."}


def trust_page(text: str, folder: Path) -> str:
    """The page with its tables made anew."""
    for name, table, command in (
        ("torture", torture_table, "make torture"),
        ("wide-tables", wide_table, "python benchmarks/wide_tables.py --out results/wide-tables.json"),
    ):
        file = folder / f"{name}.json"
        told = table(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else NOT_YET.format(command)
        text = replaced(text, table_begin(name), TABLE_END, f"\n{told}\n")
    return text


def torture_table(found: dict[str, Any]) -> str:
    """By part: tried, failed, not tried, minutes; and why, for what could not be tried."""
    parts = {name: numbers | {"left": _left(numbers)} for name, numbers in found["parts"].items()}
    lines = ["| part | one try is | tried | failed | not tried | minutes |", "| --- | --- | --: | --: | --: | --: |"]
    for name, numbers in parts.items():
        lines.append(_line(name, TRIED.get(name, ""), numbers))
    total = {key: sum(numbers[key] for numbers in parts.values()) for key in ("tried", "failed", "left", "seconds")}
    lines.append(_line("in all", "", total))
    kind, environment = found["kind"], found["environment"]
    told = (
        f"{'A tenth of it' if kind['quick'] else 'All of it'}, seeds from {kind['seed']}, on {environment['device']}, "
        f"Python {environment['python']}, torch {environment['torch']}; made from {', '.join(found['commits'])}."
    )
    for name, most in MEASURED.items():
        if grown := [part["measured"][name] for part in parts.values() if name in part.get("measured", {})]:
            told += most.format(max(grown))
    if total["left"]:
        whys = (f"{name} {n:,} ({why})" for name, part in parts.items() for why, n in part.get("skipped", {}).items())
        told += f" **Could not be tried there:** {', '.join(whys)}."
    if found["missing"]:
        missing = ", ".join(f"{name} {left:,} of {count:,}" for name, (left, count) in found["missing"].items())
        told += f" **Not tried yet:** {missing}; `make torture` goes on with these."
    return "\n".join([*lines, "", told])


def wide_table(found: dict[str, Any]) -> str:
    """By number of columns: processor seconds, and how many times those of the first."""
    columns, seconds = found["columns"], found["processor_seconds"]
    lines = ["| columns | `fit` (s) | `predict` (s) | peak memory (GiB) |", "| --: | --: | --: | --: |"]
    for place, count in enumerate(columns):
        numbers = [f"{seconds[name][place]:.1f}" for name in ("fit", "predict")]
        lines.append(f"| {count:,} | {' | '.join(numbers)} | {found['peak_gib'][place]:.2f} |")
    times = [f"{seconds[name][-1] / seconds[name][0]:.1f}" for name in ("fit", "predict")]
    told = (
        f"{found['rows']:,} rows; processor time. {columns[-1] / columns[0]:g} times the columns take {times[0]} times "
        f"as long to fit and {times[1]} times to predict."
    )
    return "\n".join([*lines, "", told])


def _left(numbers: dict[str, Any]) -> int:
    return sum(numbers.get("skipped", {}).values())  # not in files of before


def _line(name: str, what: str, numbers: dict[str, Any]) -> str:
    counts = " | ".join(f"{numbers[key]:,}" for key in ("tried", "failed", "left"))
    return f"| {name} | {what} | {counts} | {numbers['seconds'] / 60:.0f} |"


if __name__ == "__main__":
    page = Path(sys.argv[2])
    write_text(page, trust_page(page.read_text(encoding="utf-8"), Path(sys.argv[1])))
