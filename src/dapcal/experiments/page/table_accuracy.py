"""The tables of docs/tables.md: what `dapcal fit` predicts beside other methods, made from results/tables.json.

Run: python -m dapcal.experiments.page.table_accuracy results docs/tables.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dapcal.experiments.page.markers import TABLE_END, replaced, table_begin
from dapcal.files import write_text

Row = dict[str, Any]
OURS, BOOSTING = "dapcal", "boosting"
NAMES = {OURS: "`dapcal fit`", BOOSTING: "HistGradientBoosting", "lightgbm": "LightGBM", "catboost": "CatBoost"}
DEFAULT = "five networks and trees"  # what `dapcal fit` trains, without gap cross-validation
RECIPES = (DEFAULT, "five networks", "five networks of all rows", "tabm of all rows", "tabm and trees")


def table_accuracy_page(text: str, folder: Path) -> str:
    """The page with its tables made anew."""
    found = json.loads((folder / "tables.json").read_text(encoding="utf-8"))
    for name, made in (("table-ranks", _ranks_table), ("table-errors", _errors_table)):
        text = replaced(text, table_begin(name), TABLE_END, f"\n{made(found['rows'])}\n")
    return replaced(text, table_begin("table-environment"), TABLE_END, f"\n{_environment(found)}\n")


def tables_of(rows: Sequence[Row]) -> list[str]:
    """Names, those with many rows last."""
    size = {row["table"]: row["rows"] for row in rows}
    return sorted(size, key=lambda name: size[name])


def methods_of(rows: Sequence[Row]) -> list[str]:
    """Those that were run on all tables."""
    tables = set(tables_of(rows))
    methods = dict.fromkeys(row["method"] for row in rows)
    return [m for m in methods if {row["table"] for row in rows if row["method"] == m} == tables]


def measured(rows: Sequence[Row], table: str, method: str, name: str) -> np.ndarray:
    """By seed; "error" is the RMSE, or the share of wrong classes."""
    own = sorted((row for row in rows if row["table"] == table and row["method"] == method), key=lambda r: r["seed"])
    return np.array([_error(row) if name == "error" else row[name] for row in own])


def mean_ranks(rows: Sequence[Row], methods: Sequence[str], name: str) -> tuple[np.ndarray, np.ndarray]:
    """From 1, the best; mean and standard error over tables, (methods,) each."""
    tables = tables_of(rows)
    values = np.array([[measured(rows, table, method, name).mean() for method in methods] for table in tables])
    less = (values[:, None, :] < values[:, :, None]).sum(2)
    equal = (values[:, None, :] == values[:, :, None]).sum(2)
    ranks = 1 + less + (equal - 1) / 2
    return ranks.mean(0), ranks.std(0, ddof=1) / np.sqrt(len(tables))


def chosen_without(rows: Sequence[Row], table: str) -> str:
    """Which of our recipes has the best mean rank, by error and NLL together, on the other tables."""
    others = [row for row in rows if row["table"] != table]
    methods = [method for method in methods_of(rows) if method in RECIPES]
    both = sum(mean_ranks(others, methods, name)[0] for name in ("error", "nll"))
    return methods[int(np.argmin(both))]


def worse_than_boosting(rows: Sequence[Row], table: str) -> tuple[float, float, float]:
    """By how much our error is higher, its standard error over seeds, and what is allowed: 2 % of RMSE, 0.5 points."""
    ours, theirs = (measured(rows, table, method, "error") for method in (OURS, BOOSTING))
    is_number = any("rmse" in row for row in rows if row["table"] == table)
    difference = ours - theirs
    allowed = 0.02 * theirs.mean() if is_number else 0.005
    return float(difference.mean()), float(difference.std(ddof=1) / np.sqrt(len(difference))), float(allowed)


def _error(row: Row) -> float:
    return row["rmse"] if "rmse" in row else 1 - row["accuracy"]


def _ranks_table(rows: Sequence[Row]) -> str:
    methods = methods_of(rows)
    error, nll = (mean_ranks(rows, methods, name) for name in ("error", "nll"))
    seconds = [sum(measured(rows, t, m, "fit_seconds").mean() for t in tables_of(rows)) for m in methods]
    lines = ["| | mean rank, error | mean rank, NLL | seconds to fit all |", "| --- | --: | --: | --: |"]
    for place in np.argsort(error[0] + nll[0]):
        cells = (f"{mean[place]:.2f} ± {spread[place]:.2f}" for mean, spread in (error, nll))
        name = NAMES.get(methods[place], methods[place])
        lines.append(f"| {name} | {' | '.join(cells)} | {seconds[place]:.0f} |")
    return "\n".join(lines)


def _errors_table(rows: Sequence[Row]) -> str:
    heads = [
        "",
        "rows",
        "measure",
        "`dapcal fit`",
        "boosting",
        "difference",
        "NLL",
        "boosting",
        "held or ECE",
        "boosting",
    ]
    lines = [f"| {' | '.join(heads)} |", f"| --- | --: | --- |{' --: |' * (len(heads) - 3)}"]
    for table in tables_of(rows):
        row = next(row for row in rows if row["table"] == table)
        last = "coverage" if "rmse" in row else "ece"
        pairs = {n: [measured(rows, table, m, n).mean() for m in (OURS, BOOSTING)] for n in ("error", "nll", last)}
        difference, spread, _ = worse_than_boosting(rows, table)
        cells = [
            *(f"{value:.4f}" for value in pairs["error"]), f"{difference:+.4f} ± {spread:.4f}",
            *(f"{value:.3f}" for value in pairs["nll"]), *(f"{100 * value:.1f} %" for value in pairs[last]),
        ]  # fmt: skip
        lines.append(f"| {table} | {row['rows']:,} | {'RMSE' if 'rmse' in row else 'wrong'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _environment(found: dict[str, Any]) -> str:
    rows = found["rows"]
    seeds = len({row["seed"] for row in rows})
    recipes = {table: chosen_without(rows, table) for table in tables_of(rows)}
    others = {table: name for table, name in recipes.items() if name != DEFAULT}
    without = (
        "What `dapcal fit` trains, five networks and trees, is also what is chosen without any one of the tables"
        + (f" (but without {', '.join(f'{table} {name}' for table, name in others.items())})" if others else "")
    )
    versions = ", ".join(f"{name} {value}" for name, value in found["environment"].items() if name != "cores")
    return f"{without}. {seeds} seeds; {versions}; one core a fit."


if __name__ == "__main__":
    page = Path(sys.argv[2])
    write_text(page, table_accuracy_page(page.read_text(encoding="utf-8"), Path(sys.argv[1])))
