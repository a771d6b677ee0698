"""Tables: what `dapcal fit` predicts beside boosting, linear models and a perceptron, on random splits of 80/20.

Every table is split once a seed. All methods see the same training rows; our own hold some of them out. Point
regressors get a Gaussian with the variance of residuals on a fifth of the training rows that a first fit did not see;
they then learn from all. Measures: RMSE (of the target's standard deviation) or accuracy, NLL (of the standardised
target), CRPS or Brier score, coverage of 95 % intervals or expected calibration error, seconds to fit and to predict.

    python benchmarks/tables.py prepare FOLDER      splits and encodes (needs pyarrow and DAPCAL_DATA=<folder>)
    python benchmarks/tables.py run FOLDER [--jobs N] [--methods a,b] [--tables a,b] [--seeds 5] [--minutes M]
    python benchmarks/tables.py summary

`run` goes on where an earlier one stopped, method by method and split by split; packages that are missing are left out.
`--again` forgets the rows of its methods first.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from as_fitted import Numbers, fitted, gaussian
from tables_ranks import summary

from dapcal.experiments.checkout import commit
from dapcal.files import write_text
from dapcal.likelihoods import Categorical
from dapcal.recipes import Recipe, fit

TEST = 0.2
RESULT = Path("results/tables.json")
FILES: dict[str, tuple[str, str, tuple[str, ...]]] = {  # file, target, columns that name rows
    "ames": ("tables/ames.csv", "SalePrice", ("Order", "PID")),
    "german_credit": ("tables/german_credit.csv", "default", ()),
    "insurance": ("tables/insurance.csv", "charges", ()),
    "penguins": ("tables/penguins.csv", "species", ()),
    "titanic": ("tables/titanic.csv", "Survived", ("PassengerId", "Name")),
    "wine_white": ("tables/wine_white.csv", "quality", ()),
    "boston": ("uci/boston.csv", "MEDV", ()),
    "concrete": ("uci/concrete.csv", "compressive_strength", ()),
    "energy": ("uci/energy.csv", "heating_load", ()),
    "naval": ("uci/naval.csv", "", ()),  # the last column
    "wine_red": ("uci/wine.csv", "quality", ()),
}
OWN = ("breast_cancer", "diabetes", "iris", "wine")  # scikit-learn's
REGRESSION = ("wine_red",)  # marks that the published splits predict as numbers

Split = dict[str, np.ndarray]
Answer = Numbers | np.ndarray
"""Of numbers, or probabilities of classes (N, K)."""


def main() -> None:
    asked = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    asked.add_argument("what", choices=["prepare", "run", "summary"])
    asked.add_argument("folder", nargs="?", type=Path, default=Path("build/tables"))
    asked.add_argument("--jobs", type=int, default=2)
    asked.add_argument("--seeds", type=int, default=5)
    asked.add_argument("--tables", default=",".join((*FILES, *OWN)))
    asked.add_argument("--methods", default=",".join(METHODS))
    asked.add_argument("--minutes", type=float, default=float("inf"))
    asked.add_argument("--result", type=Path, default=RESULT)
    asked.add_argument("--again", action="store_true")
    options = asked.parse_args()
    if options.what == "prepare":
        prepare(options.folder, options.tables.split(","), options.seeds)
    elif options.what == "run":
        run(options)
    else:
        print(summary(json.loads(options.result.read_text())["rows"]))


def run(options: argparse.Namespace) -> None:
    """All jobs that are not done yet; those of one seed come first, long ones first of all."""
    for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[threads] = "1"  # one job, one core; read by the processes that are started below
    started = time.perf_counter()
    before = json.loads(options.result.read_text()) if options.result.exists() else {"rows": [], "environments": {}}
    done, environments = before["rows"], before["environments"]
    known = {(row["table"], row["method"], row["seed"]) for row in done}
    if options.again:
        done = [row for row in done if row["method"] not in options.methods.split(",")]
        known = {(row["table"], row["method"], row["seed"]) for row in done}
    methods = [name for name in options.methods.split(",") if importlib.util.find_spec(NEEDS.get(name, "torch"))]
    names = options.tables.split(",")
    asking = [(t, m, s) for s in range(options.seeds) for t in _by_size(options.folder, names) for m in methods]
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        calls = {pool.submit(row_of, options.folder, *job): job for job in asking if job not in known}
        for call in as_completed(calls):
            if call.cancelled():
                continue
            if call.exception():
                print(*calls[call], repr(call.exception()), flush=True)
                continue
            done.append(call.result())
            print(json.dumps(done[-1]), flush=True)
            late = time.perf_counter() - started > 60 * options.minutes
            environments[done[-1]["method"]] = _environment()
            _write(options.result, done, environments, time.perf_counter() - started)
            if late:
                for other in calls:
                    other.cancel()
    print(summary(done))


def row_of(folder: Path, table: str, method: str, seed: int) -> dict[str, Any]:
    """One method on one split."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with np.load(folder / f"{table}-{seed}.npz") as file:
        split = dict(file)
    started = time.perf_counter()
    answer = METHODS[method](split, seed)
    fitted = time.perf_counter()
    found = answer(split["x_test"], split["raw_test"])
    ended = time.perf_counter()
    y = split["y_test"]
    measures = of_numbers(y, found) if isinstance(found, Numbers) else of_classes(found, y)
    seconds = {"fit_seconds": round(fitted - started, 2), "predict_seconds": round(ended - fitted, 3)}
    kind = "classes" if "classes" in split else "numbers"
    row = {"table": table, "kind": kind, "method": method, "seed": seed, "rows": len(split["y"])}
    return {**row, **{name: round(float(value), 5) for name, value in measures.items()}, **seconds}


def of_classes(probabilities: np.ndarray, y: np.ndarray, bins: int = 15) -> dict[str, float]:
    p = np.clip(probabilities, 1e-7, 1)
    p = p / p.sum(1, keepdims=True)
    right, sure = p.argmax(1) == y, p.max(1)
    place = np.minimum((sure * bins).astype(int), bins - 1)
    gaps = [abs(right[place == b].mean() - sure[place == b].mean()) * (place == b).mean() for b in np.unique(place)]
    return {
        "accuracy": right.mean(),
        "nll": -np.log(p[np.arange(len(y)), y]).mean(),
        "brier": ((p - np.eye(p.shape[1])[y]) ** 2).sum(1).mean(),
        "ece": sum(gaps),
    }


def of_numbers(y: np.ndarray, found: Numbers) -> dict[str, float]:
    """Of standardised targets; coverage of intervals, over fifths of the prediction the least."""
    inside = (found.lower <= y) & (y <= found.upper)
    return {
        "rmse": np.sqrt(((y - found.mean) ** 2).mean()),
        "nll": -found.log_density(y).mean(),
        "crps": found.crps(y).mean(),
        "coverage": inside.mean(),
        "least_coverage": min(part.mean() for part in np.array_split(inside[found.mean.argsort()], 5)),
        "width": (found.upper - found.lower).mean(),
    }


def ours(**options: Any) -> Callable[[Split, int], Callable[..., Answer]]:
    """A recipe; those beside the default leave out gap cross-validation."""

    def learnt(split: Split, seed: int) -> Callable[..., Answer]:
        recipe = Recipe(seed=seed, fast=bool(options), **options)
        if "classes" not in split:
            of_rows = fitted(split["x"], split["y"], float(split["zero"]), recipe)
            return lambda x, raw: of_rows(x)  # noqa: ARG005
        x, y = torch.from_numpy(split["x"]), torch.from_numpy(split["y"])
        model = fit(x, y, Categorical(), int(split["classes"]), recipe).calibrated
        return lambda x, raw: model(torch.from_numpy(x)).probs.numpy()  # noqa: ARG005

    return learnt


def theirs(make: Callable[[bool, np.ndarray, int], Any], raw: bool) -> Callable[[Split, int], Callable[..., Answer]]:
    """An estimator in scikit-learn's manner, of raw columns or of those that networks get."""

    def fitted(split: Split, seed: int) -> Callable[..., Answer]:
        x, y, classes = split["raw" if raw else "x"], split["y"], "classes" in split
        if classes:
            model = make(True, split["categories"], seed).fit(x, y)
            known = model.classes_.astype(int).ravel()

            def probabilities(x: np.ndarray, columns: np.ndarray) -> Answer:
                p = np.zeros((len(x), int(split["classes"])))
                p[:, known] = model.predict_proba(columns if raw else x)
                return p

            return probabilities
        order = np.random.default_rng(seed).permutation(len(y))
        apart, others = order[: len(y) // 5], order[len(y) // 5 :]
        first = make(False, split["categories"], seed).fit(x[others], y[others])
        deviation = np.sqrt(((y[apart] - np.asarray(first.predict(x[apart])).ravel()) ** 2).mean())
        model = make(False, split["categories"], seed).fit(x, y)

        def answer(x: np.ndarray, columns: np.ndarray) -> Answer:
            mean = np.asarray(model.predict(columns if raw else x)).ravel()
            return gaussian(mean, np.full(len(x), deviation))

        return answer

    return fitted


def catboost_noise(split: Split, seed: int) -> Callable[..., Answer]:
    """CatBoost that learns a variance for every row beside its mean; of classes the plain one."""
    import catboost

    if "classes" in split:
        return theirs(_catboost, raw=True)(split, seed)
    own = {"random_seed": seed, "thread_count": 1, "verbose": 0, "allow_writing_files": False}
    names = np.flatnonzero(split["categories"]).tolist()
    model = _Texts(
        catboost.CatBoostRegressor(loss_function="RMSEWithUncertainty", cat_features=names, **own), split["categories"]
    ).fit(split["raw"], split["y"])

    def answer(x: np.ndarray, columns: np.ndarray) -> Answer:  # noqa: ARG001
        mean, variance = np.asarray(model.predict(columns)).T
        return gaussian(mean, np.sqrt(variance))

    return answer


def _boosting(classes: bool, categories: np.ndarray, seed: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    kind = HistGradientBoostingClassifier if classes else HistGradientBoostingRegressor
    return kind(categorical_features=categories, random_state=seed)


def _lightgbm(classes: bool, categories: np.ndarray, seed: int) -> Any:
    import lightgbm

    kind = lightgbm.LGBMClassifier if classes else lightgbm.LGBMRegressor
    names = np.flatnonzero(categories).tolist()
    return _With(kind(random_state=seed, n_jobs=1, verbose=-1), categorical_feature=names or "auto")


def _catboost(classes: bool, categories: np.ndarray, seed: int) -> Any:
    import catboost

    kind = catboost.CatBoostClassifier if classes else catboost.CatBoostRegressor
    own = {"random_seed": seed, "thread_count": 1, "verbose": 0, "allow_writing_files": False}
    return _Texts(kind(cat_features=np.flatnonzero(categories).tolist(), **own), categories)


def _linear(classes: bool, categories: np.ndarray, seed: int) -> Any:  # noqa: ARG001
    from sklearn.linear_model import LogisticRegressionCV, RidgeCV

    if not classes:
        return RidgeCV(np.logspace(-3, 4, 15))
    return LogisticRegressionCV(Cs=6, cv=3, scoring="neg_log_loss", max_iter=2000)


def _perceptron(classes: bool, categories: np.ndarray, seed: int) -> Any:  # noqa: ARG001
    from sklearn.neural_network import MLPClassifier, MLPRegressor

    kind = MLPClassifier if classes else MLPRegressor
    return kind(hidden_layer_sizes=(64, 64), early_stopping=True, max_iter=500, random_state=seed)


class _With:
    """An estimator whose `fit` is given more."""

    def __init__(self, model: Any, **given: Any) -> None:
        self.model, self.given = model, given

    def fit(self, x: np.ndarray, y: np.ndarray) -> Any:
        return self.model.fit(x, y, **self.given)


class _Texts:
    """An estimator that wants categories as texts."""

    def __init__(self, model: Any, categories: np.ndarray) -> None:
        self.model, self.categories = model, categories

    def fit(self, x: np.ndarray, y: np.ndarray) -> _Texts:
        self.model.fit(self._told(x), y)
        self.classes_ = getattr(self.model, "classes_", None)
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.model.predict(self._told(x))

    def predict_proba(self, x: np.ndarray) -> np.ndarray:
        return self.model.predict_proba(self._told(x))

    def _told(self, x: np.ndarray) -> np.ndarray:
        told = x.astype(object)
        told[:, self.categories] = x[:, self.categories].astype(str)
        return told


METHODS: dict[str, Callable[[Split, int], Callable[..., Answer]]] = {
    "boosting": theirs(_boosting, raw=True),
    "lightgbm": theirs(_lightgbm, raw=True),
    "catboost": theirs(_catboost, raw=True),
    "catboost with noise": catboost_noise,
    "linear": theirs(_linear, raw=False),
    "perceptron": theirs(_perceptron, raw=False),
    "dapcal": ours(),
    "five networks": ours(trees=False, refit=False),
    "five networks of all rows": ours(trees=False),
    "five networks and trees": ours(posterior="ensemble"),
    "tabm of all rows": ours(posterior="tabm", trees=False),
    "tabm and trees": ours(posterior="tabm"),
}
NEEDS = {
    "lightgbm": "lightgbm",
    "catboost": "catboost",
    "catboost with noise": "catboost",
    "boosting": "sklearn",
    "linear": "sklearn",
}


def prepare(folder: Path, names: list[str], seeds: int) -> None:
    """Splits of every table: what networks get, raw columns with categories as numbers, and targets."""
    from dapcal.models.table_fitting import fit_encoder, fit_target, guess, with_target
    from dapcal.tables import Classes
    from dapcal.tables.columns import Category

    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        table, target, drop = _table(name)
        rows, _ = with_target(table, target)
        task = "regression" if name in REGRESSION else guess(rows[target], target).name
        goal = fit_target(rows[target], task, target)
        for seed in range(seeds):
            order = np.random.default_rng(seed).permutation(len(rows))
            test, train = np.split(order, [round(TEST * len(rows))])
            encoder = fit_encoder(rows.take(train), target, drop)
            if not goal.labels:
                goal = fit_target(rows.take(train)[target], task, target)
            split: Split = {"categories": np.array([isinstance(c, Category) for c in encoder.columns])}
            for suffix, index in (("", train), ("_test", test)):
                part = rows.take(index)
                y = goal.encode(part[target]).numpy()
                split[f"x{suffix}"] = encoder(part).x.numpy()
                split[f"raw{suffix}"] = np.column_stack([_raw(column, part[column.name]) for column in encoder.columns])
                split[f"y{suffix}"] = y if goal.labels else y[:, 0].astype(np.float64)
            if isinstance(goal, Classes):
                split["classes"] = np.array(len(goal.labels))
            else:
                split["zero"] = np.array(goal.standardised(0.0))
            np.savez_compressed(folder / f"{name}-{seed}.npz", **split)  # type: ignore[arg-type]
        print(name, task, split["x"].shape, len(goal.labels) or "numbers", flush=True)


def _raw(column: Any, values: Any) -> np.ndarray:
    """A column for boosting: numbers, or places of levels; missing and unknown ones are NaN."""
    from dapcal.tables.columns import Category
    from dapcal.tables.values import numbers, texts

    if not isinstance(column, Category):
        return numbers(values, column.name)
    place = {level: float(number) for number, level in enumerate((*column.levels, "", *column.rare))}
    return np.array(
        [min(place.get(text, np.nan), len(column.levels)) for text in texts(values, column.name).to_pylist()]
    )


def _table(name: str) -> tuple[Any, str, tuple[str, ...]]:
    import pyarrow as pa

    from dapcal import tables

    if name in OWN:
        from sklearn import datasets

        frame = getattr(datasets, f"load_{name}")(as_frame=True).frame
        return pa.Table.from_pandas(frame, preserve_index=False), "target", ()
    file, target, drop = FILES[name]
    table = tables.read(Path(os.environ["DAPCAL_DATA"]) / file)
    return table, target or table.column_names[-1], drop


def _by_size(folder: Path, names: list[str]) -> list[str]:
    """Large tables first, which take the longest."""
    return sorted(names, key=lambda name: -(folder / f"{name}-0.npz").stat().st_size)


def _environment() -> dict[str, Any]:
    packages = ("torch", "numpy", "sklearn", "lightgbm", "catboost")
    known = {name: importlib.import_module(name).__version__ for name in packages if importlib.util.find_spec(name)}
    return {"python": platform.python_version(), "cores": os.cpu_count(), **known, "commit": commit()}


def _write(path: Path, rows: list[dict[str, Any]], environments: dict[str, Any], seconds: float) -> None:
    rows = sorted(rows, key=lambda row: (row["table"], row["method"], row["seed"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"experiment": "tables", "environments": environments, "seconds": round(seconds, 1)}
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    write_text(path, json.dumps(result, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
