"""p-values and intervals of tables over many refits: no more rows are flagged, or targets outside, than is said.

`run(count, seed)` fits `count` models of new rows each, as `dapcal fit --fast` does, and asks them about others. By
hand: `python tests/torture/validity.py 500 0`.
"""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parent.parent))

from dapcal.models.table_fitting import fit
from dapcal.recipes import Recipe
from torture.tally import Tally

LEVELS = (0.05, 0.1, 0.2)
INTERVAL = 0.95
ERRORS = 3  # standard errors that a share may be beyond what it should be
ROWS, ASKED = 260, 200
OFTEN = 1 / np.arange(1, 41) ** 1.2  # rows of a level, in proportion: of 40, most are rare
RARELY = 0.004  # share of missing ages: about every third model is fitted without one

Shares = dict[str, list[float]]
"""By what is promised: the share of asked rows for which it did not hold, one for every refit."""


def run(count: int, seed: int = 0) -> Tally:
    """Fit `count` models; how many promises were looked at over all of them, and those that were not kept."""
    tally, shares = Tally("validity"), Shares()
    for number in range(count):
        of_classes = number % 2 == 0
        with warnings.catch_warnings(action="ignore"):
            for promise, share in refit(of_classes, seed * 10**6 + number).items():
                shares.setdefault(promise, []).append(share)
    judge(shares, tally)
    tally.tried += count
    return tally


def refit(of_classes: bool, seed: int) -> dict[str, float]:
    """Shares of one model: rows flagged at each level, and targets outside of their intervals."""
    rows = drawn(ROWS + ASKED, of_classes, seed)
    recipe = Recipe(hidden=(8,), epochs=3, members=2, fast=True, seed=seed)
    model = fit(rows.slice(0, ROWS), "target", recipe=recipe)
    asked = rows.slice(ROWS)
    found = model.predict(asked.drop_columns(["target"]), level=INTERVAL).table
    p = np.array(found["ood_p_value"].to_pylist())
    kind = "classes" if of_classes else "numbers"
    shares = {f"{kind}: {level} flagged": float((p <= level + 1e-9).mean()) for level in LEVELS}
    if not of_classes:
        target, lower, upper = (np.array(t.to_pylist()) for t in (asked["target"], found["lower"], found["upper"]))
        shares[f"{kind}: {1 - INTERVAL:.2f} outside"] = float(((target < lower) | (target > upper)).mean())
    return shares


def drawn(count: int, of_classes: bool, seed: int) -> pa.Table:
    """Rows with skewed noise, rare levels and missing cells; some levels and blanks are in asked rows alone."""
    draws = np.random.default_rng(seed)
    area, rooms = draws.normal(80, 20, count), draws.integers(1, 6, count).astype(float)
    levels = {name: draws.choice(len(OFTEN), count, p=OFTEN / OFTEN.sum()) for name in ("city", "street", "agent")}
    price = 3 * area + 30 * (levels["city"] == 0) + draws.exponential(20, count) * rooms
    target = np.where(price > 350, "dear", "cheap") if of_classes else price
    rooms[draws.random(count) < 0.05] = np.nan
    age = np.where(draws.random(count) < RARELY, np.nan, draws.normal(40, 9, count))
    holed = {"rooms": pa.array(rooms, from_pandas=True), "age": pa.array(age, from_pandas=True)}
    named = {name: found.astype(str) for name, found in levels.items()}
    return pa.table({"area": area, **holed, **named, "target": target})


def judge(shares: Shares, tally: Tally) -> None:
    """Means over refits, against what was promised; their error is that of the mean."""
    for promise, found in shares.items():
        at_most = float(promise.split()[1])
        mean, error = float(np.mean(found)), float(np.std(found)) / math.sqrt(len(found))
        fine = mean <= at_most + ERRORS * error + 1e-9
        tally.check(fine, f"{promise}: {mean:.4f} ± {error:.4f} over {len(found)} refits")


if __name__ == "__main__":
    found = run(int(sys.argv[1]), int(sys.argv[2]))
    print("\n".join(found.failed))
    print(f"tried {found.tried}, failed {len(found.failed)}")
