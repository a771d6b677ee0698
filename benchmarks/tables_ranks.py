"""Mean ranks of methods over tables, and which recipe would have been chosen without each table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]


def summary(rows: Sequence[Row]) -> str:
    """Means over seeds of every table, mean ranks, and the choice among our recipes without each table."""
    tables = sorted({row["table"] for row in rows})
    methods = [m for m in _in_order(rows) if {r["table"] for r in rows if r["method"] == m} == set(tables)]
    error = _means(rows, tables, methods, "error")
    nll = _means(rows, tables, methods, "nll")
    lines = [f"{'':22}" + "".join(f"{m[-18:]:>19}" for m in methods)]
    for place, table in enumerate(tables):
        cells = "".join(f"{e:>10.4f}{n:>9.3f}" for e, n in zip(error[place], nll[place], strict=True))
        lines.append(f"{table:22}{cells}")
    ranks = np.stack([_ranks(error), _ranks(nll)])  # (2, tables, methods)
    spread = ranks.std(1, ddof=1) / np.sqrt(len(tables)) if len(tables) > 1 else np.zeros(ranks.shape[::2])
    means = ranks.mean(1)
    for measure, mean, own in zip(("error", "NLL"), means, spread, strict=True):
        lines.append(f"{'mean rank, ' + measure:22}" + "".join(
            f"{m:>12.2f} ± {s:.2f}" for m, s in zip(mean, own, strict=True)))  # fmt: skip
    seconds = _means(rows, tables, methods, "fit_seconds").sum(0)
    lines.append(f"{'seconds':22}" + "".join(f"{value:>19.1f}" for value in seconds))
    ours = [place for place, m in enumerate(methods) if m.startswith(("dapcal", "five networks", "tabm"))]
    if len(ours) > 1 and len(tables) > 1:
        both = ranks[:, :, ours].mean(0)
        chosen = [methods[ours[int(np.delete(both, place, 0).mean(0).argmin())]] for place in range(len(tables))]
        lines += [f"{table:22}chosen without it: {name}" for table, name in zip(tables, chosen, strict=True)]
    return "\n".join(lines)


def _in_order(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def _means(rows: Sequence[Row], tables: list[str], methods: list[str], name: str) -> np.ndarray:
    """Over the seeds that all methods have, (tables, methods)."""
    values = {(r["table"], r["method"], r["seed"]): _value(r, name) for r in rows}
    found = np.empty((len(tables), len(methods)))
    for place, table in enumerate(tables):
        seeds = [{s for t, m, s in values if t == table and m == method} for method in methods]
        common = set.intersection(*seeds) or {0}
        found[place] = [np.mean([values.get((table, m, s), np.nan) for s in common]) for m in methods]
    return found


def _value(row: Row, name: str) -> float:
    if name != "error":
        return row[name]
    return row["rmse"] if "rmse" in row else 1 - row["accuracy"]


def _ranks(values: np.ndarray) -> np.ndarray:
    """From 1, the lowest; equal ones share."""
    less = (values[:, None, :] < values[:, :, None]).sum(2)
    equal = (values[:, None, :] == values[:, :, None]).sum(2)
    return 1 + less + (equal - 1) / 2
