"""Which combination of the pieces of evidence makes the OOD score: the one with the best worst case.

Cases: digits, MNIST and Fashion-MNIST (1,350 training images each) with one class in turn left out of training, which
is the outlier; on the same and on tables of scikit-learn the synthetic outliers of `dapcal.distances.outliers`. Small
networks, ensembles of three; data sets of outliers that one would test on are not looked at. Scales and ranks come from
the half of the held-out data that chooses φ. A combination is judged by AUROC against test inputs, per case the mean
over seeds; its regret is how far it stays behind the best combination of that case.
Run: python benchmarks/evidence_combination.py [folder]
"""

from __future__ import annotations

import json
import math
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from torch import Tensor, nn

import dapcal
from dapcal.distances.outliers import synthetic
from dapcal.experiments.datasets.images import as_floats, fashion_mnist, mnist
from dapcal.files import write_text
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.posteriors import ensemble
from dapcal.ranks import auroc
from dapcal.types import DapcalWarning

SEEDS, MEMBERS, EPOCHS, IMAGES = (0, 1), 3, 10, 1500
TABLES = {"breast cancer": load_breast_cancer, "wine": load_wine, "diabetes": load_diabetes}


def main(folder: str = "build") -> None:
    warnings.simplefilter("ignore", DapcalWarning)
    torch.set_num_threads(1)
    started = time.perf_counter()
    found: dict[str, dict[str, list[float]]] = {}
    for seed in SEEDS:
        for case in cases(seed):
            for name, scores in measured(case, seed).items():
                print(f"{name:32}" + "".join(f"{value:8.3f}" for value in scores.values()), flush=True)
                for combination, value in scores.items():
                    found.setdefault(name, {}).setdefault(combination, []).append(value)
    results: dict[str, Any] = {
        "experiment": "evidence-combination",
        "seeds": SEEDS,
        "members": MEMBERS,
        "epochs": EPOCHS,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "dapcal": dapcal.__version__,
        "seconds": round(time.perf_counter() - started, 1),
        "auroc": found,
        "summary": summary(found),
    }
    show(results["summary"])
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_text(Path(folder) / "evidence-combination.json", json.dumps(results, indent=1) + "\n")


Score = Callable[[Tensor, Tensor], Tensor]
"""From standardised pieces (M, N), and those of the half that chooses (M, n), to a score (N,)."""


def _tails(pieces: Tensor, chooses: Tensor) -> Tensor:
    """Share of the choosing half as high, (M, N), never 0."""
    ordered = chooses.sort(1).values
    return (1 + chooses.shape[1] - torch.searchsorted(ordered, pieces.contiguous())) / (1 + chooses.shape[1])


def _by_ranks(combine: Callable[[Tensor], Tensor]) -> Score:
    """Of the tails; beyond the highest rank all are alike, and the sum decides."""

    def score(pieces: Tensor, chooses: Tensor) -> Tensor:
        return combine(_tails(pieces, chooses)) + 1e-6 * pieces.sum(0).arctan()

    return score


COMBINATIONS: dict[str, Score] = {
    "sum": lambda pieces, _: pieces.sum(0),
    "doubt + mean distance": lambda pieces, _: pieces[0] + (pieces[1:].mean(0) if len(pieces) > 1 else 0),
    "logsumexp": lambda pieces, _: pieces.logsumexp(0),
    "maximum": lambda pieces, _: pieces.amax(0),
    "maximum of ranks": _by_ranks(lambda tails: -tails.amin(0)),
    "Fisher of ranks": _by_ranks(lambda tails: -tails.log().sum(0)),
    "Cauchy of ranks": _by_ranks(lambda tails: ((0.5 - tails) * math.pi).tan().mean(0)),
    "Stouffer of ranks": _by_ranks(lambda tails: -torch.special.ndtri(tails - 0.5 * tails.amin()).sum(0)),
}


class Case(NamedTuple):
    """Data of one model, and what is left out of all of them."""

    name: str
    x: Tensor
    y: Tensor
    outside: dict[str, Tensor]
    train: int  # rows, the next 40 % of the others are held out, the rest are tests


def cases(seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed)
    digits = load_digits()
    images = {"digits": (torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target))}
    for name, load in (("MNIST", mnist), ("Fashion-MNIST", fashion_mnist)):
        data = load("train")
        rows = torch.randperm(len(data.x), generator=generator)[: 2 * IMAGES]
        images[name] = as_floats(data.x[rows]), data.y[rows]
    for name, (x, y) in images.items():
        for left_out in range(10):
            known = (y != left_out).nonzero().flatten()
            known = known[torch.randperm(len(known), generator=generator)]
            labels = y[known] - (y[known] > left_out).long()
            yield Case(name, x[known], labels, {f"class {left_out}": x[y == left_out]}, len(known) // 2)
    for name, load in TABLES.items():
        table, target = load(return_X_y=True)
        rows = torch.randperm(len(table), generator=generator)
        x = torch.tensor(table, dtype=torch.float32)[rows]
        is_number = name == "diabetes"
        y = torch.tensor(target, dtype=torch.float32 if is_number else torch.long)[rows]
        y = ((y - y.mean()) / y.std())[:, None] if is_number else y
        yield Case(name, (x - x.mean(0)) / x.std(0), y, {}, len(x) // 2)


def measured(case: Case, seed: int) -> dict[str, dict[str, float]]:
    """AUROC of every combination for every kind of outlier."""
    x, y, n = case.x, case.y, case.train
    cut = n + int(0.4 * (len(x) - n))
    is_number = y.is_floating_point()
    outputs = 1 if is_number else int(y.max()) + 1

    def make() -> nn.Module:
        layers = [nn.Linear(x[0].numel(), 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, outputs)]
        return nn.Sequential(nn.Flatten(), *layers)

    likelihood = Gaussian(0.7) if is_number else Categorical()
    training = {"epochs": EPOCHS, "batch_size": 128, "learning_rate": 1e-2}
    posterior = ensemble.fit(make, likelihood, (x[:n], y[:n]), members=MEMBERS, seed=seed, **training)
    held_out = x[n:cut], y[n:cut]
    calibrated = dapcal.calibrate(posterior, train=(x[:n], y[:n]), held_out=held_out, seed=seed, candidates=8)
    assert calibrated.chooses is not None

    def pieces(inputs: Tensor) -> Tensor:
        return torch.stack([piece.standardised for piece in calibrated.predict(inputs).evidence.values()]).double()

    chooses, inside = pieces(held_out[0][calibrated.chooses]), pieces(x[cut:])
    outside = {f"{case.name}, {kind}": pieces(each) for kind, each in case.outside.items()}
    if "class 0" in case.outside or not case.outside:
        outside |= {f"{case.name}, {kind}": pieces(each) for kind, each in synthetic(x[:n], x[cut:]).items()}
    return {
        name: {each: auroc(score(far, chooses), score(inside, chooses)) for each, score in COMBINATIONS.items()}
        for name, far in outside.items()
    }


def summary(found: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, Any]]:
    """Per combination the worst case and the mean, and the largest and mean regret, with the error over seeds."""
    means = {name: {each: float(np.mean(values)) for each, values in scores.items()} for name, scores in found.items()}
    told = {}
    for each in COMBINATIONS:
        regret = {name: max(scores.values()) - scores[each] for name, scores in means.items()}
        worst, behind = min(means, key=lambda name: means[name][each]), max(regret, key=lambda name: regret[name])
        told[each] = {
            "worst": means[worst][each],
            "worst case": worst,
            "worst, error over seeds": float(np.std(found[worst][each], ddof=1) / len(SEEDS) ** 0.5),
            "mean": float(np.mean([scores[each] for scores in means.values()])),
            "largest regret": regret[behind],
            "regretted": behind,
            "mean regret": float(np.mean(list(regret.values()))),
        }
    return told


def show(told: dict[str, dict[str, Any]]) -> None:
    for each, row in told.items():
        print(
            f"{each:20} worst {row['worst']:.3f} ± {row['worst, error over seeds']:.3f} ({row['worst case']}), mean "
            f"{row['mean']:.4f}, regret {row['mean regret']:.4f}, at most {row['largest regret']:.3f} "
            f"({row['regretted']})",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
