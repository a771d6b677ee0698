"""The table of docs/unusual-rows.md: which rows of a table are flagged, made from results/table-flags.json.

Run: python -m dapcal.experiments.page.table_flags results docs/unusual-rows.md
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dapcal.experiments.page.markers import TABLE_END, replaced, table_begin
from dapcal.files import write_text

WAYS = ("wrong unit", "wrong unit, rounded", "unseen category", "blank row")
OTHERS = ("ours", "ours, score", "nearest neighbours", "isolation forest")


def table_flags_page(text: str, folder: Path) -> str:
    """The page with its table made anew."""
    found = json.loads((folder / "table-flags.json").read_text(encoding="utf-8"))["tables"]
    return replaced(text, table_begin("table-flags"), TABLE_END, f"\n{_table(found)}\n")


def mean_of(seeds: list[dict[str, Any]], way: str) -> float:
    """AUROC over columns, factors and seeds; NaN where a table has nothing of the kind."""
    values = [value for one in seeds for value in _leaves(one[way])]
    return float(np.mean(values)) if values else math.nan


def subgroup(seeds: list[dict[str, Any]], who: str) -> float:
    """AUROC over subgroups and seeds."""
    return float(np.mean([own[who] for one in seeds for own in one["subgroup"].values()]))


def flagged(seeds: list[dict[str, Any]]) -> tuple[float, float]:
    """Share of ordinary rows with p <= 0.05, and its standard error; the judging rows vary as well as the new ones."""
    rows = sum(one["rows"] for one in seeds)
    share = sum(one["flagged"] for one in seeds) / rows
    errors = [0.05 * 0.95 * (1 / one["rows"] + 1 / one["judging rows"]) for one in seeds]
    return share, math.sqrt(sum(errors)) / len(seeds)


def _leaves(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [leaf for own in value.values() for leaf in _leaves(own)]
    return [value]


def _table(found: dict[str, list[dict[str, Any]]]) -> str:
    heads = ["", "ordinary rows flagged (%)", *WAYS, *(f"subgroup: {who}" for who in OTHERS)]
    lines = [f"| {' | '.join(heads)} |", f"| --- |{' --: |' * (len(heads) - 1)}"]
    for name, seeds in found.items():
        share, error = flagged(seeds)
        numbers = [mean_of(seeds, way) for way in WAYS] + [subgroup(seeds, who) for who in OTHERS]
        lines.append(f"| {name} | {100 * share:.1f} ± {100 * error:.1f} | {' | '.join(map(_shown, numbers))} |")
    return "\n".join(lines)


def _shown(value: float) -> str:
    return "" if math.isnan(value) else f"{100 * value:.1f}"


if __name__ == "__main__":
    page = Path(sys.argv[2])
    write_text(page, table_flags_page(page.read_text(encoding="utf-8"), Path(sys.argv[1])))
