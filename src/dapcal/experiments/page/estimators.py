"""The table of docs/sklearn.md: the estimators beside scikit-learn's perceptrons, made from results/estimators.json.

Run: python -m dapcal.experiments.page.estimators results docs/sklearn.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dapcal.experiments.page.markers import TABLE_END, replaced, table_begin
from dapcal.experiments.records import DEFAULTS
from dapcal.files import write_text

MEASURES = {  # data set: measures in the file, and whether more is better
    "digits": (("accuracy", True), ("NLL", False)),
    "breast cancer": (("accuracy", True), ("NLL", False)),
    "wine": (("accuracy", True), ("NLL", False)),
    "diabetes": (("RMSE", False), ("NLL", False), ("NLL, inner variance", False)),
}


class Compared(NamedTuple):
    """A measure over folds: mean and standard error, of ours, theirs, and ours − theirs."""

    data: str
    measure: str
    more_is_better: bool
    ours: tuple[float, float]
    theirs: tuple[float, float]
    difference: tuple[float, float]


def compared(found: dict[str, Any]) -> list[Compared]:
    """All rows of the table, from what the benchmark has written."""
    rows = []
    for data, measures in MEASURES.items():
        for measure, more in measures:
            ours, theirs = np.array(found[data][measure]).T  # (folds,)
            means = [(float(v.mean()), float(v.std(ddof=1) / len(v) ** 0.5)) for v in (ours, theirs, ours - theirs)]
            rows.append(Compared(data, measure, more, *means))
    return rows


def estimators_page(text: str, folder: Path) -> str:
    """The page with its table made anew."""
    found = json.loads((folder / "estimators.json").read_text(encoding="utf-8"))
    return replaced(text, table_begin("estimators"), TABLE_END, f"\n{_table(found)}\n")


def _table(found: dict[str, Any]) -> str:
    lines = ["| | distance-aware | perceptron | difference |", "| --- | --: | --: | --: |"]
    for row in compared(found):
        digits = 1 if row.measure == "RMSE" else 3
        cells = [f"{mean:.{digits}f} ± {error:.{digits}f}" for mean, error in (row.ours, row.theirs, row.difference)]
        lines.append(f"| {row.data}, {row.measure} | {' | '.join(cells)} |")
    unknown = list(found["digits, one class unknown"].values())
    moved = "; ".join(
        f"{name} {100 * each['auroc']:.1f} (worst {100 * each['worst']:.1f})"
        for name, each in found["one column moved"].items()
    )
    versions = found["environment"]
    earlier = (
        "" if versions["defaults"] == DEFAULTS else f" (today's are {DEFAULTS}; they stand until they are run again)"
    )
    folds = f"{found['folds']}-fold cross-validation, {found['repeats']} times"
    return "\n".join(
        [
            *lines,
            "",
            f"Default parameters; {folds}; means ± standard errors over folds. A perceptron's NLL in regression is "
            "that of a Gaussian with the variance of its training residuals, or of residuals from inner folds. "
            f"Detection, AUROC (%): digits, one class left out of training: {100 * np.mean(unknown):.1f} on average, "
            f"{100 * min(unknown):.1f} at worst; a column moved by six standard deviations: {moved}. scikit-learn "
            f"{versions['scikit-learn']}, torch {versions['torch']}, defaults {versions['defaults']}{earlier}, seed "
            f"{found['seed']}.",
        ]
    )


if __name__ == "__main__":
    results, page = map(Path, sys.argv[1:])
    write_text(page, estimators_page(page.read_text(encoding="utf-8"), results))
