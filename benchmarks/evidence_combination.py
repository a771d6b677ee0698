"""Which combination of the pieces of evidence makes the OOD score: good in the mean, and rarely worse than doubt alone.

Cases: digits, MNIST and Fashion-MNIST (1,350 training images each), wine and iris with one class in turn left out of
training, which is the outlier; five kinds of oscillations, 64 points in noise, one of them left out; diabetes
(regression) without the rows in the upper fifth of a column; on the same images and on tables of scikit-learn the
synthetic outliers of `dapcal.distances.outliers`. Small networks, ensembles of three and one network with a Laplace
approximation of its last layer; data sets of outliers that one would test on are not looked at. Scales, ranks and
weights come from the half of the held-out data that chooses. The library's score is "weighed sum", of softened
pieces; where synthetic outliers judge it, the weights were set without their kind. A combination is judged by AUROC
against test inputs, per case the mean over seeds and both posteriors; its regret is how far it stays behind the best
combination of that case, its loss how far behind doubt alone.
Run: python benchmarks/evidence_combination.py [folder]
"""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine
from torch import Tensor, nn

import dapcal
from dapcal.calibration.ood_score import center_and_scale, softened
from dapcal.calibration.weighing import PROBES, weights_of
from dapcal.distances.outliers import near, synthetic
from dapcal.experiments.datasets.images import as_floats, fashion_mnist, mnist
from dapcal.experiments.records import environment
from dapcal.files import write_text
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.posteriors import ensemble, laplace
from dapcal.ranks import auroc
from dapcal.types import DapcalWarning

SEEDS, MEMBERS, EPOCHS, IMAGES = (0, 1), 3, 10, 1500
TABLES = {"breast cancer": load_breast_cancer, "wine": load_wine, "diabetes": load_diabetes}
COLUMNS = (0, 2, 3, 4, 8)  # of diabetes, with many values
LOSS = 0.005  # of AUROC to doubt, that counts


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
        "environment": environment(),
        "seconds": round(time.perf_counter() - started, 1),
        "auroc": found,
        "summary": summary(found),
    }
    show(results["summary"])
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_text(Path(folder) / "evidence-combination.json", json.dumps(results, indent=1) + "\n")


Score = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From standardised pieces (M, N), those of the half that chooses (M, n), and weights (M,), to a score (N,)."""


def _doubt_or_distances(pieces: Tensor, chooses: Tensor, weights: Tensor) -> Tensor:
    """log(e^doubt + ¾ e^distances), these a weighed sum with median 0 and 95 % quantile 1: about the larger."""
    if len(pieces) == 1:
        return pieces[0]
    weights = weights[1:] if weights[1:].any() else torch.ones_like(weights[1:])
    far, usual = (weights @ softened(each[1:]) for each in (pieces, chooses))
    center, scale = center_and_scale(usual[None])
    return torch.logaddexp(pieces[0], (far - center) / scale + math.log(0.75))


def _tails(pieces: Tensor, chooses: Tensor) -> Tensor:
    """Share of the choosing half as high, (M, N), never 0."""
    ordered = chooses.sort(1).values
    return (1 + chooses.shape[1] - torch.searchsorted(ordered, pieces.contiguous())) / (1 + chooses.shape[1])


def _by_ranks(combine: Callable[[Tensor], Tensor]) -> Score:
    """Of the tails; beyond the highest rank all are alike, and the sum decides."""

    def score(pieces: Tensor, chooses: Tensor, _: Tensor) -> Tensor:
        return combine(_tails(pieces, chooses)) + 1e-6 * pieces.sum(0).arctan()

    return score


COMBINATIONS: dict[str, Score] = {
    "weighed sum": lambda pieces, _, weights: weights @ softened(pieces),
    "weighed sum of z": lambda pieces, _, weights: weights @ pieces,
    "doubt or distances": _doubt_or_distances,
    "sum": lambda pieces, *_: pieces.sum(0),
    "doubt": lambda pieces, *_: pieces[0],
    "doubt + mean distance": lambda pieces, *_: pieces[0] + (pieces[1:].mean(0) if len(pieces) > 1 else 0),
    "logsumexp": lambda pieces, *_: pieces.logsumexp(0),
    "maximum": lambda pieces, *_: pieces.amax(0),
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
    for name, load in (("wine", load_wine), ("iris", load_iris)):
        table, target = (torch.tensor(part) for part in load(return_X_y=True))
        x, y = ((table - table.mean(0)) / table.std(0)).float(), target.long()
        for left_out in range(3):
            known = (y != left_out).nonzero().flatten()
            known = known[torch.randperm(len(known), generator=generator)]
            labels = y[known] - (y[known] > left_out).long()
            yield Case(name, x[known], labels, {f"class {left_out}": x[y == left_out]}, len(known) // 2)
    table, target = (torch.tensor(part) for part in load_diabetes(return_X_y=True))
    x, y = ((table - table.mean(0)) / table.std(0)).float(), ((target - target.mean()) / target.std()).float()[:, None]
    for column in COLUMNS:
        high = x[:, column] > x[:, column].quantile(0.8)
        known = (~high).nonzero().flatten()
        known = known[torch.randperm(len(known), generator=generator)]
        yield Case("diabetes", x[known], y[known], {f"top of column {column}": x[high]}, len(known) // 2)
    for name, load in TABLES.items():
        table, target = load(return_X_y=True)
        rows = torch.randperm(len(table), generator=generator)
        x = torch.tensor(table, dtype=torch.float32)[rows]
        is_number = name == "diabetes"
        y = torch.tensor(target, dtype=torch.float32 if is_number else torch.long)[rows]
        y = ((y - y.mean()) / y.std())[:, None] if is_number else y
        yield Case(name, (x - x.mean(0)) / x.std(0), y, {}, len(x) // 2)
    for left_out in WAVES:
        known = [name for name in WAVES if name != left_out]
        x = torch.cat([wave(name, 400, generator) for name in known])
        y = torch.arange(len(known)).repeat_interleave(400)
        rows = torch.randperm(len(x), generator=generator)
        yield Case("oscillations", x[rows], y[rows], {left_out: wave(left_out, 400, generator)}, len(x) // 2)


WAVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": lambda phase, _: phase.sin(),
    "chirp": lambda phase, time: (phase * (0.5 + time)).sin(),
    "beats": lambda phase, _: 0.6 * phase.sin() + 0.6 * (1.35 * phase).sin(),
    "damped": lambda phase, time: 1.6 * (-3 * time).exp() * phase.sin(),
    "harmonic": lambda phase, _: 0.8 * phase.sin() + 0.5 * (2 * phase + 1).sin(),
}


def wave(name: str, n: int, generator: torch.Generator) -> Tensor:
    """Waves (n, 1, 64) of any frequency, start and height, in noise."""
    time = torch.linspace(0, 1, 64)
    frequency, start, height = (torch.rand(n, 1, generator=generator) for _ in range(3))
    phase = 2 * math.pi * ((3 + 3 * frequency) * time + start)
    return ((0.6 + 0.8 * height) * WAVES[name](phase, time) + 0.3 * torch.randn(n, 64, generator=generator))[:, None]


def measured(case: Case, seed: int) -> dict[str, dict[str, float]]:
    """AUROC of every combination for every kind of outlier, the mean over both posteriors."""
    x, y, n = case.x, case.y, case.train
    cut = n + int(0.4 * (len(x) - n))
    is_number = y.is_floating_point()
    outputs = 1 if is_number else int(y.max()) + 1

    def make() -> nn.Module:
        first: list[nn.Module] = [nn.Flatten(), nn.Linear(x[0].numel(), 64)]
        if x.ndim == 3:
            along = [nn.Conv1d(1, 16, 7, 2, 3), nn.ReLU(), nn.Conv1d(16, 64, 5, 2, 2), nn.ReLU()]
            first = [*along, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 64)]
        return nn.Sequential(*first, nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, outputs))

    likelihood = Gaussian(0.7) if is_number else Categorical()
    training = {"epochs": EPOCHS, "batch_size": 128, "learning_rate": 1e-2}
    train, held_out = (x[:n], y[:n]), (x[n:cut], y[n:cut])
    members = ensemble.fit(make, likelihood, train, members=MEMBERS, seed=seed, **training)
    scale = laplace.HeldOut(held_out, lowest=1e-4)
    alone = laplace.last_layer(members.network, likelihood, train, prior_scale=scale)
    found: dict[str, dict[str, float]] = {}
    for posterior in (members, alone):
        calibrated = dapcal.calibrate(posterior, train=train, held_out=held_out, seed=seed, candidates=8)
        for name, scores in of_posterior(calibrated, case, held_out[0], x[cut:]).items():
            for each, value in scores.items():
                found.setdefault(name, {}).setdefault(each, 0.0)
                found[name][each] += value / 2
    return found


def of_posterior(
    calibrated: dapcal.Calibrated, case: Case, held_out: Tensor, test: Tensor
) -> dict[str, dict[str, float]]:
    """The same of one posterior."""
    train, chosen = case.x[: case.train], calibrated.chooses
    assert chosen is not None

    def pieces(inputs: Tensor) -> Tensor:
        return torch.stack([piece.standardised for piece in calibrated.predict(inputs).evidence.values()]).double()

    chooses, inside = pieces(held_out[chosen]), pieces(test)
    asked = {kind: pieces(each) for kind, each in near(train, held_out[chosen][:PROBES]).items()}

    def scores(kind: str, far: Tensor) -> dict[str, float]:
        weights = weights_of(chooses, [each for other, each in asked.items() if other != kind])
        if kind not in asked and calibrated.evidence.weights is not None:
            torch.testing.assert_close(weights, calibrated.evidence.weights, rtol=1e-3, atol=1e-3)
        return {
            each: auroc(score(far, chooses, weights), score(inside, chooses, weights))
            for each, score in COMBINATIONS.items()
        }

    outside = dict(case.outside)
    if "class 0" in case.outside or not case.outside:
        outside |= synthetic(train, test)
    return {f"{case.name}, {kind}": scores(kind, pieces(each)) for kind, each in outside.items()}


def summary(found: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, Any]]:
    """Per combination the worst case and the mean, regrets, and losses to doubt, with the error over seeds."""
    means = {name: {each: float(np.mean(values)) for each, values in scores.items()} for name, scores in found.items()}
    told = {}
    for each in COMBINATIONS:
        regret = {name: max(scores.values()) - scores[each] for name, scores in means.items()}
        worst, behind = min(means, key=lambda name: means[name][each]), max(regret, key=lambda name: regret[name])
        loss = {name: scores["doubt"] - scores[each] for name, scores in means.items()}
        most = max(loss, key=lambda name: loss[name])
        told[each] = {
            "worst": means[worst][each],
            "worst case": worst,
            "worst, error over seeds": float(np.std(found[worst][each], ddof=1) / len(SEEDS) ** 0.5),
            "mean": float(np.mean([scores[each] for scores in means.values()])),
            "largest regret": regret[behind],
            "regretted": behind,
            "mean regret": float(np.mean(list(regret.values()))),
            "largest loss": loss[most],
            "lost": most,
            "cases lost": sum(value > LOSS for value in loss.values()),
        }
    return told


def show(told: dict[str, dict[str, Any]]) -> None:
    for each, row in told.items():
        print(
            f"{each:20} worst {row['worst']:.3f} ± {row['worst, error over seeds']:.3f} ({row['worst case']}), mean "
            f"{row['mean']:.4f}, regret {row['mean regret']:.4f}, at most {row['largest regret']:.3f} "
            f"({row['regretted']}), loss to doubt in {row['cases lost']} cases, at most {row['largest loss']:.3f} "
            f"({row['lost']})",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
