"""The tables of docs/tables.md: what `dapcal fit` predicts beside other methods, made from results/tables.json.

Run: python -m dapcal.experiments.page.table_accuracy results docs/tables.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dapcal.experiments.page.markers import TABLE_END, replaced, table_begin
from dapcal.files import write_text

Row = dict[str, Any]
FEWEST_SPLITS = 3  # of a table whose intervals are shown
OURS, BOOSTING = "dapcal", "boosting"
NAMES = {OURS: "`dapcal fit`", BOOSTING: "HistGradientBoosting", "lightgbm": "LightGBM"}
NAMES |= {"catboost": "CatBoost", "catboost with noise": "CatBoost with its own noise"}
_EITHER: dict[str, Callable[[Row], float]] = {
    "error": lambda row: row["rmse"] if "rmse" in row else 1 - row["accuracy"],
    "score": lambda row: row["crps"] if "rmse" in row else row["brier"],
}
DEFAULT = "five networks and trees"  # what `dapcal fit` trains, without gap cross-validation
RECIPES = (DEFAULT, "five networks", "five networks of all rows", "tabm of all rows", "tabm and trees")


def table_accuracy_page(text: str, folder: Path) -> str:
    """The page with its tables made anew."""
    found = json.loads((folder / "tables.json").read_text(encoding="utf-8"))
    for name, made in (("table-ranks", _ranks_table), ("table-errors", _errors_table)):
        text = replaced(text, table_begin(name), TABLE_END, f"\n{made(found['rows'])}\n")
    intervals = json.loads((folder / "table-intervals.json").read_text(encoding="utf-8"))["rows"]
    gaps = json.loads((folder / "gap-recipe.json").read_text(encoding="utf-8"))
    text = replaced(text, table_begin("table-gaps"), TABLE_END, f"\n{_gaps_table(gaps)}\n")
    text = replaced(text, table_begin("table-intervals"), TABLE_END, f"\n{_intervals_table(intervals)}\n")
    if (folder / "fit-time.json").exists():
        times = json.loads((folder / "fit-time.json").read_text(encoding="utf-8"))["tables"]
        text = replaced(text, table_begin("table-fit-time"), TABLE_END, f"\n{_times_table(times)}\n")
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


def side_by_side(rows: Sequence[Row]) -> list[str]:
    """What one would take, ours among them; our other recipes are for choosing it."""
    return [method for method in methods_of(rows) if method not in RECIPES]


def measured(rows: Sequence[Row], table: str, method: str, name: str) -> np.ndarray:
    """By seed; "error" is the RMSE, or the share of wrong classes, "score" the CRPS, or the Brier score."""
    own = sorted((row for row in rows if row["table"] == table and row["method"] == method), key=lambda r: r["seed"])
    return np.array([_EITHER[name](row) if name in _EITHER else row[name] for row in own])


def mean_ranks(rows: Sequence[Row], methods: Sequence[str], name: str) -> tuple[np.ndarray, np.ndarray]:
    """From 1, the best; mean and standard error over tables, (methods,) each."""
    tables = tables_of(rows)
    values = np.array([[measured(rows, table, method, name).mean() for method in methods] for table in tables])
    less = (values[:, None, :] < values[:, :, None]).sum(2)
    equal = (values[:, None, :] == values[:, :, None]).sum(2)
    ranks = 1 + less + (equal - 1) / 2
    return ranks.mean(0), ranks.std(0, ddof=1) / np.sqrt(len(tables))


def recipe_rows(rows: Sequence[Row]) -> list[Row]:
    """Of our recipes, under the seeds that all of them have."""
    own = [row for row in rows if row["method"] in RECIPES and row["method"] in methods_of(rows)]
    seeds = set.intersection(*({row["seed"] for row in own if row["method"] == m} for m in methods_of(own)))
    return [row for row in own if row["seed"] in seeds]


def chosen_without(rows: Sequence[Row], table: str) -> str:
    """Which of our recipes has the best mean rank, by error and NLL together, on the other tables."""
    others = [row for row in recipe_rows(rows) if row["table"] != table]
    methods = methods_of(others)
    both = sum(mean_ranks(others, methods, name)[0] for name in ("error", "nll"))
    return methods[int(np.argmin(both))]


def worse_than_boosting(rows: Sequence[Row], table: str) -> tuple[float, float, float]:
    """By how much our error is higher, its standard error over seeds, and what is allowed: 2 % of RMSE, 0.5 points."""
    ours, theirs = (measured(rows, table, method, "error") for method in (OURS, BOOSTING))
    is_number = any("rmse" in row for row in rows if row["table"] == table)
    difference = ours - theirs
    allowed = 0.02 * theirs.mean() if is_number else 0.005
    return float(difference.mean()), float(difference.std(ddof=1) / np.sqrt(len(difference))), float(allowed)


def coverage(rows: Sequence[Row], table: str) -> tuple[float, float]:
    """Targets inside intervals, the mean over splits and its standard error."""
    shares = np.array([row["inside"] / row["rows"] for row in rows if row["table"] == table])
    return float(shares.mean()), float(shares.std(ddof=1) / np.sqrt(len(shares)))


def worst_fifth(rows: Sequence[Row], table: str, by: str) -> tuple[float, float]:
    """The least share inside over fifths, of all splits together, and its standard error over splits."""
    counts = np.array([row[by] for row in rows if row["table"] == table])  # (splits, 5, rows and inside)
    shares = counts[..., 1].sum(0) / counts[..., 0].sum(0)
    place = int(shares.argmin())
    each = counts[:, place, 1] / counts[:, place, 0]
    return float(shares[place]), float(each.std(ddof=1) / np.sqrt(len(each)))


def _intervals_table(rows: Sequence[Row]) -> str:
    heads = ["", "splits", "training rows", "new rows", "inside", "worst fifth by prediction", "by distance"]
    lines = [f"| {' | '.join(heads)} |", f"| --- |{' --: |' * (len(heads) - 1)}"]
    for table in dict.fromkeys(row["table"] for row in rows):
        own = [row for row in rows if row["table"] == table]
        if len(own) < FEWEST_SPLITS:
            continue
        pairs = [coverage(rows, table), *(worst_fifth(rows, table, f"by {by}") for by in ("prediction", "distance"))]
        cells = (f"{100 * share:.1f} ± {100 * error:.1f} %" for share, error in pairs)
        size = f"{own[0]['train']:,} | {sum(row['rows'] for row in own):,}"
        lines.append(f"| {table} | {len(own)} | {size} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ranks_table(rows: Sequence[Row]) -> str:
    methods = side_by_side(rows)
    error, nll, score = (mean_ranks(rows, methods, name) for name in ("error", "nll", "score"))
    seconds = {
        name: [sum(measured(rows, t, m, name).mean() for t in tables_of(rows)) for m in methods]
        for name in ("fit_seconds", "predict_seconds")
    }
    heads = ["", "mean rank, error", "NLL", "CRPS or Brier", "seconds to fit all", "to predict"]
    lines = [f"| {' | '.join(heads)} |", f"| --- |{' --: |' * (len(heads) - 1)}"]
    for place in np.argsort(error[0] + nll[0]):
        cells = [f"{mean[place]:.2f} ± {spread[place]:.2f}" for mean, spread in (error, nll, score)]
        cells += [f"{seconds['fit_seconds'][place]:.0f}", f"{seconds['predict_seconds'][place]:.1f}"]
        lines.append(f"| {NAMES.get(methods[place], methods[place])} | {' | '.join(cells)} |")
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


def _gaps_table(found: dict[str, Any]) -> str:
    """Log-likelihood of test rows in gaps, mean and standard error over splits."""
    heads = {"no network": "no network", "none": "distance ignored", "fast": "`--fast`", "default": "`dapcal fit`"}
    lines = [f"|  | splits | {' | '.join(heads.values())} |", "| --- | --: | --: | --: | --: | --: |"]
    for name, summary in found["summary"].items():
        count = sum(row["set"] == name for row in found["rows"])
        cells = " | ".join(f"{summary[way][0]:.2f} ± {summary[way][1]:.2f}" for way in heads)
        lines.append(f"| {name} | {count} | {cells} |")
    return "\n".join(lines)


def _times_table(tables: dict[str, Any]) -> str:
    """Seconds of `dapcal fit` by the size of a table, medians over turns."""
    lines = [
        "| rows × columns | way | seconds | of the processor | turns | cores |",
        "| --- | --- | --: | --: | --: | --: |",
    ]
    for size, told in tables.items():
        rows, _, columns = size.partition(" × ")
        for way, seconds in told["seconds"].items():
            used = told["processor_seconds"][way]
            lines.append(
                f"| {int(rows):,} × {columns} | {'`dapcal fit`' if way == 'default' else '`--fast`'} | "
                f"{np.median(seconds):.1f} | {np.median(used):.1f} | {len(seconds)} | {told['environment']['cores']} |"
            )
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
    compared = recipe_rows(rows)
    names = methods_of(compared)
    ranks = zip(names, *(mean_ranks(compared, names, name)[0] for name in ("error", "nll")), strict=True)
    told = ", ".join(f"{name} ({error:.2f}, {nll:.2f})" for name, error, nll in ranks)
    seeds_of_all = len({row["seed"] for row in compared})
    without += f"; compared, with mean ranks by error and NLL under {seeds_of_all} seeds: {told}"
    where: dict[str, list[str]] = {}
    for method, own in found["environments"].items():
        versions = ", ".join(f"{name} {value}" for name, value in own.items() if name != "cores")
        where.setdefault(versions, []).append(NAMES.get(method, method))
    made = "; ".join(f"{', '.join(methods)}: {versions}" for versions, methods in where.items())
    return f"{without}. {seeds} seeds, one core a fit. {made}."


if __name__ == "__main__":
    page = Path(sys.argv[2])
    write_text(page, table_accuracy_page(page.read_text(encoding="utf-8"), Path(sys.argv[1])))
