"""The estimators with default parameters beside scikit-learn's perceptrons: accuracy, NLL and unknown inputs.

Five-fold cross-validation on scikit-learn's own data sets, three times, folds and seeds the same for all. Errors are
standard errors over the folds, as if these were independent. A perceptron's regression
density is Gaussian, with the variance of its training residuals or of residuals from five folds inside the training
data. Unknown inputs: one class of digits left out of training, and one column of a table moved by six of its standard
deviations. Run: python benchmarks/estimators.py [folder] [--jobs 2]
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
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

from dapcal.experiments.parallel import processes
from dapcal.experiments.records import environment, one_thread
from dapcal.files import write_text
from dapcal.sklearn import DistanceAwareClassifier, DistanceAwareRegressor

SEED, FOLDS, REPEATS, MOST_STEPS = 0, 5, 3, 5000
CLASSES = {"digits": load_digits, "breast cancer": load_breast_cancer, "wine": load_wine}


def main() -> None:
    asked = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    asked.add_argument("folder", nargs="?", type=Path, default=Path("build"))
    asked.add_argument("--jobs", type=int, default=2)
    options = asked.parse_args()
    started = time.perf_counter()
    results: dict[str, Any] = {
        "experiment": "estimators",
        "seed": SEED,
        "folds": FOLDS,
        "repeats": REPEATS,
        "environment": environment() | {"scikit-learn": sklearn.__version__, "scipy": scipy.__version__},
        "parameters": DistanceAwareClassifier().get_params(),
    }
    folds = [(repeat, fold) for repeat in range(REPEATS) for fold in range(FOLDS)]
    with processes(options.jobs) as submit:
        ours = {name: [submit(measured, name, *each) for each in folds] for name in (*CLASSES, "diabetes")}
        digits = {str(digit): submit(unknown_class, digit) for digit in range(10)}
        moved = {name: submit(moved_columns, name) for name in ("breast cancer", "diabetes")}
        print(f"{'':24}{'distance-aware':>22}{'perceptron':>22}{'difference':>22}")
        for name, calls in ours.items():
            found = [call.result() for call in calls]
            results[name] = show(name, {measure: [fold[measure] for fold in found] for measure in found[0]})
        results["digits, one class unknown"] = aurocs = {digit: call.result() for digit, call in digits.items()}
        print(
            f"digits, one class unknown: AUROC mean {np.mean([*aurocs.values()]):.3f}, worst {min(aurocs.values()):.3f}"
        )
        results["one column moved"] = {name: call.result() for name, call in moved.items()}
    results["seconds"] = round(time.perf_counter() - started, 1)
    options.folder.mkdir(parents=True, exist_ok=True)
    write_text(options.folder / "estimators.json", json.dumps(results, indent=1) + "\n")


Found = dict[str, list[list[float]]]
"""By measure: for every fold, ours and theirs."""


@one_thread()
def measured(name: str, repeat: int, fold: int) -> dict[str, list[float]]:
    """By measure ours and theirs, on one fold."""
    warnings.simplefilter("ignore", ConvergenceWarning)  # diabetes: 5,000 passes are not enough for every perceptron
    seed = SEED + repeat
    if name in CLASSES:
        X, y = CLASSES[name](return_X_y=True)
        splits = StratifiedKFold(FOLDS, shuffle=True, random_state=seed).split(X, y)
        return classification(X, y, *list(splits)[fold], seed)
    X, y = load_diabetes(return_X_y=True)
    return regression(X, y, *list(KFold(FOLDS, shuffle=True, random_state=seed).split(X))[fold], seed)


def classification(
    X: np.ndarray, y: np.ndarray, train: np.ndarray, test: np.ndarray, seed: int
) -> dict[str, list[float]]:
    """Accuracy and mean NLL."""
    theirs = make_pipeline(StandardScaler(), MLPClassifier(max_iter=MOST_STEPS, random_state=seed))
    both = [
        m.fit(X[train], y[train]).predict_proba(X[test]) for m in (DistanceAwareClassifier(random_state=seed), theirs)
    ]
    return {
        "accuracy": [float((p.argmax(1) == y[test]).mean()) for p in both],
        "NLL": [nll_of_classes(p, y[test]) for p in both],
    }


def regression(X: np.ndarray, y: np.ndarray, train: np.ndarray, test: np.ndarray, seed: int) -> dict[str, list[float]]:
    """RMSE and mean NLL; the latter with both variances of theirs."""
    theirs = make_pipeline(StandardScaler(), MLPRegressor(max_iter=MOST_STEPS, random_state=seed))
    inner = np.std(y[train] - cross_val_predict(theirs, X[train], y[train], cv=FOLDS))
    theirs.fit(X[train], y[train])
    outer = np.std(y[train] - theirs.predict(X[train]))
    ours = DistanceAwareRegressor(random_state=seed).fit(X[train], y[train])
    (mean, std), other = ours.predict(X[test], return_std=True), theirs.predict(X[test])
    _, lower, upper = ours.predict(X[test], interval=0.9)
    own = nll_of_normal(mean, std, y[test])
    z = 1.6448536269514722 * inner
    return {
        "RMSE": [rmse(mean, y[test]), rmse(other, y[test])],
        "NLL": [own, nll_of_normal(other, outer, y[test])],
        "NLL, inner variance": [own, nll_of_normal(other, inner, y[test])],
        "coverage of 90 %": [
            float(((lower < y[test]) & (y[test] < upper)).mean()),
            float((abs(other - y[test]) < z).mean()),
        ],
    }


@one_thread()
def unknown_class(digit: int) -> float:
    """AUROC of −score_samples for one digit left out of training, against test inputs of the other nine."""
    X, y = load_digits(return_X_y=True)
    known = y != digit
    train, test, labels, _ = train_test_split(X[known], y[known], test_size=0.2, stratify=y[known], random_state=SEED)
    return auroc(DistanceAwareClassifier(random_state=SEED).fit(train, labels), X[~known], test)


@one_thread()
def moved_columns(name: str) -> dict[str, float]:
    """AUROC of −score_samples for test inputs with one column moved, for each column; and how often that is flagged."""
    kind, load = {
        "breast cancer": (DistanceAwareClassifier, load_breast_cancer),
        "diabetes": (DistanceAwareRegressor, load_diabetes),
    }[name]
    X, y = load(return_X_y=True)
    model: Any = kind(random_state=SEED)
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
    main()
