"""Which rows of a table are flagged: wrong units, unseen categories, blanks, a subgroup that training never saw.

Tables of `DAPCAL_DATA` (folders tables and uci) and scikit-learn's own. A random 80 % of the rows are fitted with
`fast`, the others are ordinary rows, or are made unusual. Everything is the AUROC of the p-value against the ordinary
rows:

- one numeric column in a wrong unit, × 2.2, × 10 and ÷ 10, one at a time over the ten most important ones (permutation
  importance); rows whose value stays the same (0) are left out. Once as the product is, and once rounded to as many
  decimals as the column has, which hides what decimals give away;
- a category that training never saw, one column at a time over the ten most important ones;
- a row of blanks;
- a subgroup left out of training: rows with one level of a category, with that column and without it, in tables without
  categories one of four clusters; beside nearest neighbours and an isolation forest on one-hot inputs. Few judging rows
  make p-values coarse, and ties count half, so that the AUROC of the score, which they are read from, stands beside it.

Run: python benchmarks/table_flags.py [folder] [seeds] [table ...]
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import sklearn
import torch
from sklearn.cluster import KMeans
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris, load_wine
from sklearn.ensemble import IsolationForest
from sklearn.neighbors import NearestNeighbors

from dapcal import tables
from dapcal.experiments.records import environment
from dapcal.files import write_text
from dapcal.metrics import auroc
from dapcal.models.table import TableModel
from dapcal.models.table_fitting import fit
from dapcal.models.table_summary import summarise
from dapcal.recipes import Recipe
from dapcal.tables.columns import Number

FACTORS = {"× 2.2": 2.2, "× 10": 10.0, "÷ 10": 0.1}
MOST = 10  # columns
FILES = {  # name: file, target, columns that only name rows, columns whose numbers are names
    "ames": ("tables/ames.csv", "SalePrice", ("Order", "PID"), ("MS SubClass",)),
    "german credit": ("tables/german_credit.csv", "default", (), ()),
    "insurance": ("tables/insurance.csv", "charges", (), ()),
    "penguins": ("tables/penguins.csv", "species", (), ()),
    "titanic": ("tables/titanic.csv", "Survived", ("PassengerId", "Name", "Ticket", "Cabin"), ()),
    "white wine": ("tables/wine_white.csv", "quality", (), ()),
    "boston": ("uci/boston.csv", "MEDV", (), ()),
    "concrete": ("uci/concrete.csv", "compressive_strength", (), ()),
    "energy": ("uci/energy.csv", "heating_load", (), ()),
    "naval": ("uci/naval.csv", "gt_compressor_decay_state_coefficient", (), ()),
    "red wine": ("uci/wine.csv", "quality", (), ()),
}
OWN = {"breast cancer": load_breast_cancer, "iris": load_iris, "wine": load_wine}


def main(folder: str = "build", seeds: str = "2", *only: str) -> None:
    started = time.perf_counter()
    results: dict[str, Any] = {
        "experiment": "table-flags",
        "seeds": int(seeds),
        "recipe": "fast, 3 members",
        "environment": {**environment(), "scikit-learn": sklearn.__version__},
        "tables": {},
    }
    for name, (table, target) in every_table().items():
        if only and name not in only:
            continue
        found = [measured(table, target, seed) for seed in range(int(seeds))]
        results["tables"][name] = found
        print(f"{name:16}" + "  ".join(f"{key} {value:.3f}" for key, value in means(found).items()), flush=True)
        results["seconds"] = round(time.perf_counter() - started)
        write_text(Path(folder) / "table-flags.json", json.dumps(results, indent=1) + "\n")


def every_table() -> dict[str, tuple[pa.Table, str]]:
    root = Path(os.environ["DAPCAL_DATA"])
    found = {}
    for name, (file, target, drop, names) in FILES.items():
        table = tables.read(root / file, dict.fromkeys(names, "category"), drop)
        found[name] = (table.drop_columns(list(drop)), target)
    for name, load in OWN.items():
        data = load()
        columns = dict(zip(map(str, data.feature_names), data.data.T, strict=True))
        found[name] = (pa.table({**columns, "target": [f"c{label}" for label in data.target]}), "target")
    data = load_diabetes(scaled=False)
    columns = dict(zip(data.feature_names, data.data.T, strict=True))
    found["diabetes"] = (pa.table({**columns, "target": data.target}), "target")
    return found


def measured(table: pa.Table, target: str, seed: int) -> dict[str, Any]:
    """Everything about one table and one split."""
    train, test = parted(table, seed)
    started = time.perf_counter()
    model = fit(train, target, recipe=Recipe(fast=True, members=3, seed=seed))
    seconds = time.perf_counter() - started
    ordinary = p_values(model, test)
    important = [name for name in summarise(model).important if name in test.column_names]
    numbers = [c.name for c in model.encoder.columns if isinstance(c, Number)]
    units = {
        way: {
            sign: {
                name: value
                for name in [name for name in important if name in numbers][:MOST]
                if (value := wrong_unit(model, test, name, factor, ordinary, is_rounded)) is not None
            }
            for sign, factor in FACTORS.items()
        }
        for way, is_rounded in (("wrong unit", False), ("wrong unit, rounded", True))
    }
    unseen = {
        name: auroc(-p_values(model, with_column(test, name, pa.array(["never seen"] * len(test)))), -ordinary)
        for name in [name for name in important if name not in numbers][:MOST]
    }
    blank = test.slice(0, 1)
    for column in model.encoder.columns:
        blank = with_column(blank, column.name, pa.nulls(1, blank.schema.field(column.name).type))
    return {
        "fit seconds": round(seconds, 1),
        "rows": len(test),
        "judging rows": len(model.calibrated.evidence.held_out),
        "flagged": int((ordinary <= 0.05).sum()),
        **units,
        "unseen category": unseen,
        "blank row": auroc(-p_values(model, blank), -ordinary),
        "blank row, score": auroc(*(model.calibrated.predict(model.encoder(own).x).ood_score for own in (blank, test))),
        "subgroup": subgroups(table, target, important, numbers, seed),
    }


def parted(table: pa.Table, seed: int) -> tuple[pa.Table, pa.Table]:
    order = np.random.default_rng(seed).permutation(len(table))
    cut = int(0.8 * len(table))
    return table.take(order[:cut]), table.take(order[cut:])


def p_values(model: TableModel, table: pa.Table) -> torch.Tensor:
    parts = model.calibrated.batches(model.encoder(table).x, model.rows_at_once)
    return torch.cat([prediction.ood_p_value for prediction in parts])


def with_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, pa.chunked_array([values]))


def wrong_unit(
    model: TableModel, test: pa.Table, name: str, factor: float, ordinary: torch.Tensor, is_rounded: bool
) -> float | None:
    values = test[name].to_numpy().astype(float)
    product = values / 10 if factor == 0.1 else values * factor
    if is_rounded:
        present = values[~np.isnan(values)]
        product = np.round(product, next((d for d in range(12) if (np.round(present, d) == present).mean() > 0.95), 12))
    changed = np.flatnonzero((product != values) & ~np.isnan(values))
    if len(changed) < 5:
        return None
    wrong = with_column(test, name, pa.array(product, from_pandas=True)).take(changed)
    return auroc(-p_values(model, wrong), -ordinary)


def subgroups(
    table: pa.Table, target: str, important: list[str], numbers: list[str], seed: int
) -> dict[str, dict[str, float]]:
    """AUROC of rows of a subgroup that training never saw, ours and that of others."""
    categories = [name for name in important if name not in numbers]
    found = {}
    for name in categories:
        level = np.array([str(value) for value in table[name].to_pylist()])
        shares = {one: float((level == one).mean()) for one in np.unique(level)}
        fitting = [one for one, share in shares.items() if 0.05 <= share <= 0.4 and one != "None"]
        if not fitting:
            continue
        group = level == min(fitting, key=lambda one: abs(shares[one] - 0.2))
        found["with its column"] = left_out(table, target, group, seed)
        if len(important) > 1:
            found["without its column"] = left_out(table.drop_columns([name]), target, group, seed)
        break
    if not found:
        x = one_hot(table, target)
        group = KMeans(4, n_init=3, random_state=seed).fit_predict(x)
        found["cluster"] = left_out(table, target, group == np.bincount(group).argmin(), seed)
    return found


def left_out(table: pa.Table, target: str, group: np.ndarray, seed: int) -> dict[str, float]:
    train, test = parted(table.filter(pa.array(~group)), seed)
    strange = table.filter(pa.array(group))
    model = fit(train, target, recipe=Recipe(fast=True, members=3, seed=seed))
    x = {name: model.encoder(one).x for name, one in (("train", train), ("test", test), ("strange", strange))}
    plain = {name: np.minimum(values.numpy(), 1e3) for name, values in x.items()}
    near = NearestNeighbors(n_neighbors=1).fit(plain["train"])
    fewer = NearestNeighbors(n_neighbors=1).fit(np.minimum(model.train.x.numpy(), 1e3))
    forest = IsolationForest(random_state=seed).fit(plain["train"])

    def by(score: Any) -> float:
        return auroc(*(torch.as_tensor(score(plain[name])) for name in ("strange", "test")))

    scores = (model.calibrated.predict(x[name]).ood_score for name in ("strange", "test"))
    return {
        "ours": auroc(-p_values(model, strange), -p_values(model, test)),
        "ours, score": auroc(*scores),
        "nearest neighbours": by(lambda values: near.kneighbors(values)[0][:, 0]),
        "nearest neighbours, of the rows that we compare with": by(lambda values: fewer.kneighbors(values)[0][:, 0]),
        "isolation forest": by(lambda values: -forest.score_samples(values)),
    }


def one_hot(table: pa.Table, target: str) -> np.ndarray:
    return tables.fit_encoder(table, target)(table).x.numpy()


def means(found: list[dict[str, Any]]) -> dict[str, float]:
    """The numbers of a table in one line."""
    told = {"flagged": sum(one["flagged"] for one in found) / sum(one["rows"] for one in found)}
    for way in ("wrong unit", "wrong unit, rounded"):
        told[way] = float(np.mean([v for one in found for sign in one[way].values() for v in sign.values()]))
    unseen = [value for one in found for value in one["unseen category"].values()]
    if unseen:
        told["unseen"] = float(np.mean(unseen))
    told["blank"] = float(np.mean([one["blank row"] for one in found]))
    for way in found[0]["subgroup"]:
        for who in found[0]["subgroup"][way]:
            told[f"{way}: {who}"] = float(np.mean([one["subgroup"][way][who] for one in found]))
    return told


if __name__ == "__main__":
    main(*sys.argv[1:])
