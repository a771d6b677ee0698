"""Small made-up result files of several image experiments, with numbers that a reader can check by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NAMES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "fashion-mnist": "Fashion-MNIST"}


def method(aurocs: Mapping[str, float], **test: float) -> dict[str, Any]:
    """One row: AUROC of each OOD set (per cent), FPR95 = 100 − AUROC, and metrics on the test set."""
    found: dict[str, Any] = {
        "facts": {},
        "seconds": 2.0,
        "ood": {
            "score": {
                far: {"auroc": value / 100, "aucpr": 0.5, "fpr95": 1 - value / 100} for far, value in aurocs.items()
            }
        },
    }
    return found | ({"test": {"brier": 0.1, "adaptive_ece": 0.1, "selective_risk": 0.1, **test}} if test else {})


def experiment(
    name: str,
    outside: Sequence[str],
    rows: Mapping[str, Sequence[dict[str, Any] | None]],
    parts: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A result file: of every method one row for each seed, None where it was not made."""
    seeds = list(range(max(map(len, rows.values()))))
    runs = [
        {"seed": seed, "rows": {row: own[seed] for row, own in rows.items() if seed < len(own) and own[seed]}}
        for seed in seeds
    ]
    return {
        "experiment": name, "seeds": seeds, "environment": {"torch": "2.9", "device": "cpu"},
        "settings": {
            "inside": NAMES[name], "outside": list(outside), "network": "A.", "epochs": 1, "batch_size": 1,
            "learning_rate": 1e-3, "variational_rate": 1e-3, "draws": 1, "members": 1, "held_out": 1,
        },
        "parts": {row: (parts or {}).get(row, "newer") for row in rows},
        "main_scores": dict.fromkeys(rows, "score"), "runs": runs,
    }  # fmt: skip


def written(path: Path, *files: dict[str, Any]) -> Path:
    """A folder with these files."""
    path.mkdir(exist_ok=True)
    for data in files:
        (path / f"{data['experiment']}.json").write_text(json.dumps(data), encoding="utf-8")
    return path
