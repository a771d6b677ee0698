"""Several labels an input: one network with `MultiLabel` beside a network for every label, and valid p-values.

Data are scikit-learn's `make_multilabel_classification`, rows from another draw of its classes are out of distribution.

- "compared": for every seed one network of all labels and one for each of them are trained alike, and each is handed to
  `dapcal.calibrate`; quality at new rows before and after, and how well the score tells other rows apart. A row is
  flagged by the networks of single labels where any of them flags it.
- "validity": P(p <= α) over fresh splits of held-out rows and rows to ask about, for every piece of evidence and for
  the score; errors are Monte Carlo standard errors over splits.

Run: python benchmarks/multi_label.py [folder]
"""

from __future__ import annotations

import copy
import json
import platform
import sys
import time
import warnings
from pathlib import Path

import sklearn
import torch
from sklearn.datasets import make_multilabel_classification
from torch import Tensor, nn

import dapcal
from dapcal import label_metrics, metrics
from dapcal.experiments.checkout import commit
from dapcal.files import write_text
from dapcal.likelihoods import Bernoulli, MultiLabel
from dapcal.posteriors import plain
from dapcal.types import DapcalWarning

SEEDS = 20
TRAIN, HELD_OUT, NEW = 500, 400, 2000
COLUMNS, LABELS, WIDTH = 20, 5, 32
SPLITS, JUDGING, ASKED = 400, 100, 300
LEVELS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2)
ALPHA = 0.05


def main(folder: str = "build") -> None:
    warnings.simplefilter("ignore", DapcalWarning)
    torch.set_num_threads(1)
    started = time.perf_counter()
    compared = [compare(seed) for seed in range(SEEDS)]
    halfway = time.perf_counter()
    results = {
        "experiment": "multi-label",
        "data": "make_multilabel_classification",
        "columns": COLUMNS,
        "labels": LABELS,
        "train": TRAIN,
        "held_out": HELD_OUT,
        "new": NEW,
        "seeds": list(range(SEEDS)),
        "splits": SPLITS,
        "judging": JUDGING,
        "levels": LEVELS,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "scikit-learn": sklearn.__version__,
        "dapcal": dapcal.__version__,
        "commit": commit(),
        "compared": {way: {m: [one[way][m] for one in compared] for m in compared[0][way]} for way in compared[0]},
        "shares": validity(),
        "seconds": {
            "compared": round(halfway - started, 1),
            "validity": round(time.perf_counter() - halfway, 1),
        },
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_text(Path(folder) / "multi-label.json", json.dumps(results, indent=1) + "\n")
    for way, found in results["compared"].items():  # type: ignore[attr-defined]
        print(way, {name: round(sum(values) / len(values), 4) for name, values in found.items()}, flush=True)
    for piece, found in results["shares"].items():  # type: ignore[attr-defined]
        print(piece, [f"{s:.4f} ± {e:.4f}" for s, e in zip(found["share"], found["error"], strict=True)], flush=True)


class Source:
    """Rows of one draw of the classes, standardised by its training rows, and rows of another draw."""

    def __init__(self, seed: int, rows: int) -> None:
        x, self.y = _drawn(seed, rows)
        other, _ = _drawn(seed + 1000, NEW)
        center, scale = x[:TRAIN].mean(0), x[:TRAIN].std(0)
        self.x, self.other = (x - center) / scale, (other - center) / scale

    def rows(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of some rows."""
        return self.x[start : start + count], self.y[start : start + count]


def _drawn(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    x, y = make_multilabel_classification(
        rows, n_features=COLUMNS, n_classes=LABELS, n_labels=2, length=30, random_state=seed
    )
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def trained(x: Tensor, y: Tensor, seed: int, epochs: int = 40) -> nn.Module:
    """A network of all labels in y (N, L), by Adam on four fifths of the rows, as it was best on the others."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(COLUMNS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, y.shape[1]))
    optimizer = torch.optim.Adam(network.parameters(), 5e-3)
    used, best, kept = len(x) * 4 // 5, float("inf"), network.state_dict()
    for _ in range(epochs):
        for rows in torch.randperm(used).split(50):
            loss = nn.functional.binary_cross_entropy_with_logits(network(x[rows]), y[rows].float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            loss = nn.functional.binary_cross_entropy_with_logits(network(x[used:]), y[used:].float())
        if float(loss) < best:
            best, kept = float(loss), copy.deepcopy(network.state_dict())
    network.load_state_dict(kept)
    return network.eval()


def compare(seed: int) -> dict[str, dict[str, float]]:
    """Quality at new rows of both ways, before and after calibration."""
    source = Source(seed, TRAIN + HELD_OUT + NEW)
    train, held_out = source.rows(0, TRAIN), source.rows(TRAIN, HELD_OUT)
    x, y = source.rows(TRAIN + HELD_OUT, NEW)
    network = trained(*train, seed)
    one = dapcal.calibrate(network, train=train, held_out=held_out, seed=seed)
    assert isinstance(one.posterior.likelihood, MultiLabel)
    inside, outside = one(x), one(source.other)
    single, each = [], []
    for label in range(LABELS):
        own = trained(train[0], train[1][:, [label]], seed)
        single.append(own(x).sigmoid().detach()[:, 0])
        calibrated = dapcal.calibrate(
            own, Bernoulli(), train=(train[0], train[1][:, label]), held_out=(held_out[0], held_out[1][:, label]),
            seed=seed,
        )  # fmt: skip
        each.append((calibrated(x), calibrated(source.other)))
    probs = torch.stack([near.probs[:, 1] for near, _ in each], 1)
    anywhere = [torch.stack([p.ood_p_value for p in several]).amin(0) for several in zip(*each, strict=True)]
    scores = [torch.stack([p.ood_score for p in several]).mean(0) for several in zip(*each, strict=True)]
    return {
        "one network": _quality(network(x).sigmoid().detach(), y),
        "one network, calibrated": _quality(inside.probs, y)
        | _detection(inside.ood_score, outside.ood_score, inside.ood_p_value, outside.ood_p_value),
        "a network a label": _quality(torch.stack(single, 1), y),
        "a network a label, calibrated": _quality(probs, y) | _detection(*scores, *anywhere),
    }


def _quality(probs: Tensor, y: Tensor) -> dict[str, float]:
    found = label_metrics.per_label(probs, y)
    by_chance = torch.bernoulli(probs, generator=torch.Generator().manual_seed(0))  # labels as likely as it says
    return {
        "NLL": sum(found.nll),
        "calibration error": found.macro["calibration_error"],
        "calibration error by chance": label_metrics.per_label(probs, by_chance).macro["calibration_error"],
        "largest calibration error of a label": max(found.calibration_error),
        "accuracy": found.macro["accuracy"],
        "all right": label_metrics.subset_accuracy(probs, y),
    }


def _detection(inside: Tensor, outside: Tensor, p_inside: Tensor, p_outside: Tensor) -> dict[str, float]:
    return {
        "AUROC": metrics.detection(inside, outside).auroc,
        "flagged": float((p_inside <= ALPHA).double().mean()),
        "flagged, other classes": float((p_outside <= ALPHA).double().mean()),
    }


def validity() -> dict[str, dict[str, list[float]]]:
    """Shares of asked rows with p-values up to each level: mean over splits and its standard error."""
    source = Source(0, TRAIN + 2 * JUDGING + SPLITS * (2 * JUDGING + ASKED))
    train, chooses = source.rows(0, TRAIN), source.rows(TRAIN, 2 * JUDGING)
    posterior = plain.around(
        trained(*train, 0), MultiLabel(), dapcal.data.Labelled(*train), dapcal.data.Labelled(*chooses)
    )
    shares: dict[str, list[list[float]]] = {}
    for split in range(SPLITS):
        start = TRAIN + 2 * JUDGING + split * (2 * JUDGING + ASKED)
        held_out, asked = source.rows(start, 2 * JUDGING), source.rows(start + 2 * JUDGING, ASKED)
        calibrated = dapcal.calibrate(posterior, train=train, held_out=held_out, candidates=3, seed=split)
        prediction = calibrated(asked[0])
        named = {name: piece.p_value for name, piece in prediction.evidence.items()}
        for name, p in {**named, "score": prediction.ood_p_value}.items():
            shares.setdefault(name, []).append([float((p <= level + 1e-9).double().mean()) for level in LEVELS])
    found = {name: torch.tensor(values, dtype=torch.float64) for name, values in shares.items()}
    return {
        name: {"share": v.mean(0).tolist(), "error": (v.std(0) / len(v) ** 0.5).tolist(), "splits": [len(v)]}
        for name, v in found.items()
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
