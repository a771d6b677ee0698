"""The table of docs/targets.md: one network of all labels beside one for each, made from results/multi-label.json.

Run: python -m dapcal.experiments.page.multi_label results docs/targets.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dapcal.experiments.page.markers import TABLE_END, replaced, table_begin
from dapcal.files import write_text

MEASURES = {  # in the file: digits, factor
    "NLL": (3, 1),
    "calibration error": (3, 1),
    "largest calibration error of a label": (3, 1),
    "accuracy": (1, 100),
    "all right": (1, 100),
    "AUROC": (1, 100),
    "flagged": (1, 100),
    "flagged, other classes": (1, 100),
}
NAMES = {
    "NLL": "NLL, nats an input",
    "calibration error": "calibration error, mean over labels",
    "largest calibration error of a label": "calibration error, worst label",
    "accuracy": "labels right (%)",
    "all right": "all labels right (%)",
    "AUROC": "AUROC for rows of other classes (%)",
    "flagged": "ordinary rows flagged at 0.05 (%)",
    "flagged, other classes": "rows of other classes flagged (%)",
}


def multi_label_page(text: str, folder: Path) -> str:
    """The page with its table made anew."""
    found = json.loads((folder / "multi-label.json").read_text(encoding="utf-8"))
    return replaced(text, table_begin("multi-label"), TABLE_END, f"\n{_table(found)}\n")


def excesses(found: dict[str, Any]) -> dict[str, list[float]]:
    """By piece of evidence: (P(p <= α) − α) in Monte Carlo standard errors, level by level."""
    return {
        piece: [(s - level) / e for s, e, level in zip(one["share"], one["error"], found["levels"], strict=True)]
        for piece, one in found["shares"].items()
    }


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Over seeds."""
    return float(np.mean(values)), float(np.std(values, ddof=1) / len(values) ** 0.5)


def _table(found: dict[str, Any]) -> str:
    ways = found["compared"]
    lines = [f"| | {' | '.join(ways)} |", f"| --- |{' --: |' * len(ways)}"]
    for measure, (digits, factor) in MEASURES.items():
        cells = [_cell(way.get(measure), digits, factor) for way in ways.values()]
        lines.append(f"| {NAMES[measure]} | {' | '.join(cells)} |")
    gain = np.subtract(ways["a network a label, calibrated"]["NLL"], ways["one network, calibrated"]["NLL"]).tolist()
    chance = np.mean(ways["one network, calibrated"]["calibration error by chance"])
    worst = max(value for piece in excesses(found).values() for value in piece)
    at = found["levels"].index(0.05)
    score = found["shares"]["score"]
    told = (
        f"Means ± standard errors over {len(found['seeds'])} draws of `{found['data']}` ({found['columns']} columns, "
        f"{found['labels']} labels; {found['train']} rows to train on, {found['held_out']} held out, {found['new']} "
        "new ones). Networks of one hidden layer, stopped early. One network gains "
        f"{_cell(gain, 3, 1)} nats over a network a label, both calibrated. A calibration error of about "
        f"{chance:.3f} is chance with so many rows. A network a label has a p-value a label: flagged is what any of "
        f"them flags, so that its share of ordinary rows is not 0.05. Over {score['splits'][0]} fresh splits with "
        f"{found['judging']} rows that judge, P(p ≤ 0.05) of the score of one network is {score['share'][at]:.4f} ± "
        f"{score['error'][at]:.4f}; over all pieces and levels no share lies more than {max(worst, 0):.1f} standard "
        f"errors above its level. scikit-learn {found['scikit-learn']}, torch {found['torch']}; "
        "`python benchmarks/multi_label.py results`."
    )
    return "\n".join([*lines, "", told])


def _cell(values: list[float] | None, digits: int, factor: float) -> str:
    if values is None:
        return ""
    mean, error = mean_and_error([factor * value for value in values])
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


if __name__ == "__main__":
    results, page = map(Path, sys.argv[1:])
    write_text(page, multi_label_page(page.read_text(encoding="utf-8"), results))
