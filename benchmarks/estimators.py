"""The estimators with default parameters beside scikit-learn's perceptrons: accuracy, NLL and unknown inputs.

Five-fold cross-validation on scikit-learn's own data sets, three times, folds and seeds the same for all. Errors are
standard errors over the folds, as if these were independent. A perceptron's regression
density is Gaussian, with the variance of its training residuals or of residuals from five folds inside the training
data. Unknown inputs: one class of digits left out of training, and one column of a table moved by six of its standard
deviations. Run: python benchmarks/estimators.py [folder]
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import sklearn
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import KFold, StratifiedKFold, cross_val_predict, train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dapcal.experiments.records import environment
from dapcal.files import write_text
from dapcal.sklearn import DistanceAwareClassifier, DistanceAwareRegressor

SEED, FOLDS, REPEATS, MOST_STEPS = 0, 5, 3, 5000
CLASSES = {"digits": load_digits, "breast cancer": load_breast_cancer, "wine": load_wine}


def main(folder: str = "build") -> None:
    warnings.simplefilter("ignore", ConvergenceWarning)  # diabetes: 5,000 passes are not enough for every perceptron
    started = time.perf_counter()
    results: dict[str, Any] = {
        "experiment": "estimators",
        "seed": SEED,
        "folds": FOLDS,
        "repeats": REPEATS,
        "environment": environment() | {"scikit-learn": sklearn.__version__, "scipy": scipy.__version__},
        "parameters": DistanceAwareClassifier().get_params(),
    }
    print(f"{'':24}{'distance-aware':>22}{'perceptron':>22}{'difference':>22}")
    for name, load in CLASSES.items():
        results[name] = show(name, repeated(classification, *load(return_X_y=True)))
    results["diabetes"] = show("diabetes", repeated(regression, *load_diabetes(return_X_y=True)))
    results["digits, one class unknown"] = unknown_classes(*load_digits(return_X_y=True))
    results["one column moved"] = {
        "breast cancer": moved_columns(
            DistanceAwareClassifier(random_state=SEED), *load_breast_cancer(return_X_y=True)
        ),
        "diabetes": moved_columns(DistanceAwareRegressor(random_state=SEED), *load_diabetes(return_X_y=True)),
    }
    results["seconds"] = round(time.perf_counter() - started, 1)
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_text(Path(folder) / "estimators.json", json.dumps(results, indent=1) + "\n")


Found = dict[str, list[list[float]]]
"""By measure: for every fold, ours and theirs."""


def repeated(measure: Callable[[np.ndarray, np.ndarray, int], Found], X: np.ndarray, y: np.ndarray) -> Found:
    runs = [measure(X, y, SEED + number) for number in range(REPEATS)]
    return {name: [fold for run in runs for fold in run[name]] for name in runs[0]}


def classification(X: np.ndarray, y: np.ndarray, seed: int) -> Found:
    """Accuracy and mean NLL."""
    found: Found = {"accuracy": [], "NLL": []}
    for train, test in StratifiedKFold(FOLDS, shuffle=True, random_state=seed).split(X, y):
        theirs = make_pipeline(StandardScaler(), MLPClassifier(max_iter=MOST_STEPS, random_state=seed))
        both = [
            m.fit(X[train], y[train]).predict_proba(X[test])
            for m in (DistanceAwareClassifier(random_state=seed), theirs)
        ]
        found["accuracy"].append([float((p.argmax(1) == y[test]).mean()) for p in both])
        found["NLL"].append([nll_of_classes(p, y[test]) for p in both])
    return found


def regression(X: np.ndarray, y: np.ndarray, seed: int) -> Found:
    """RMSE and mean NLL; the latter with both variances of theirs."""
    found: Found = {"RMSE": [], "NLL": [], "NLL, inner variance": [], "coverage of 90 %": []}
    for train, test in KFold(FOLDS, shuffle=True, random_state=seed).split(X):
        theirs = make_pipeline(StandardScaler(), MLPRegressor(max_iter=MOST_STEPS, random_state=seed))
        inner = np.std(y[train] - cross_val_predict(theirs, X[train], y[train], cv=FOLDS))
        theirs.fit(X[train], y[train])
        outer = np.std(y[train] - theirs.predict(X[train]))
        ours = DistanceAwareRegressor(random_state=seed).fit(X[train], y[train])
        (mean, std), other = ours.predict(X[test], return_std=True), theirs.predict(X[test])
        _, lower, upper = ours.predict(X[test], interval=0.9)
        found["RMSE"].append([rmse(mean, y[test]), rmse(other, y[test])])
        own = nll_of_normal(mean, std, y[test])
        found["NLL"].append([own, nll_of_normal(other, outer, y[test])])
        found["NLL, inner variance"].append([own, nll_of_normal(other, inner, y[test])])
        z = 1.6448536269514722 * inner
        found["coverage of 90 %"].append(
            [float(((lower < y[test]) & (y[test] < upper)).mean()), float((abs(other - y[test]) < z).mean())]
        )
    return found


def unknown_classes(X: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """AUROC of −score_samples for one digit left out of training, against test inputs of the other nine."""
    found = {}
    for digit in range(10):
        known = y != digit
        train, test, labels, _ = train_test_split(
            X[known], y[known], test_size=0.2, stratify=y[known], random_state=SEED
        )
        found[str(digit)] = auroc(DistanceAwareClassifier(random_state=SEED).fit(train, labels), X[~known], test)
    values = list(found.values())
    print(f"digits, one class unknown: AUROC mean {np.mean(values):.3f}, worst {min(values):.3f}")
    return found


def moved_columns(model: Any, X: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """AUROC of −score_samples for test inputs with one column moved, for each column; and how often that is flagged."""
    train, test, targets, _ = train_test_split(X, y, test_size=0.2, random_state=SEED)
    model.fit(train, targets)
    found, flagged = [], []
    for column in range(X.shape[1]):
        moved = test.copy()
        moved[:, column] += 6 * train[:, column].std()
        found.append(auroc(model, moved, test))
        flagged.append(float(model.is_ood(moved).mean()))
    inside = float(model.is_ood(test).mean())
    print(
        f"one of {X.shape[1]} columns moved: AUROC mean {np.mean(found):.3f}, worst {min(found):.3f}; flagged at 0.05: "
        f"{np.mean(flagged):.3f}, of the others {inside:.3f}"
    )
    return {"auroc": float(np.mean(found)), "worst": min(found), "flagged": float(np.mean(flagged)), "inside": inside}


def show(name: str, found: Found) -> Found:
    for metric, folds in found.items():
        ours, theirs = np.array(folds).T
        cells = [f"{v.mean():.4f} ± {v.std(ddof=1) / len(v) ** 0.5:.4f}" for v in (ours, theirs, ours - theirs)]
        print(f"{name + ', ' + metric:32}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
    return found


def auroc(model: Any, outside: np.ndarray, inside: np.ndarray) -> float:
    scores = -model.score_samples(np.concatenate([outside, inside]))
    return float(roc_auc_score(np.arange(len(scores)) < len(outside), scores))


def nll_of_classes(probabilities: np.ndarray, y: np.ndarray) -> float:
    return float(-np.log(np.maximum(probabilities[np.arange(len(y)), y], 1e-15)).mean())


def nll_of_normal(mean: np.ndarray, std: np.ndarray, y: np.ndarray) -> float:
    return float((0.5 * ((y - mean) / std) ** 2 + np.log(std) + 0.5 * np.log(2 * np.pi)).mean())


def rmse(mean: np.ndarray, y: np.ndarray) -> float:
    return float(np.sqrt(np.mean((mean - y) ** 2)))


if __name__ == "__main__":
    main(*sys.argv[1:])
