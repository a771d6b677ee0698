"""The tables of docs/choosing.md, made from result files and from nothing else.

Run: python -m dapcal.experiments.page.choosing results docs/choosing.md
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dapcal.experiments.page.cells import NOTHING, Number, decimal, number, show, table
from dapcal.experiments.page.files import GapResults, ImageResults, Row, read_gap, read_images
from dapcal.experiments.page.markers import TABLE_END, replaced, table_begin
from dapcal.files import write_text

COMPARED = ("mnist", "fashion-mnist")  # image experiments that have all of these rows under all seeds
POSTERIORS = {  # as the toys call them: rows alone and with distance
    "ensemble": ("DE", "DE + DAP, ours"),
    "Laplace, last layer": ("Laplace, last layer", "Laplace + DAP, ours"),
    "MC dropout": ("MC dropout", "MC dropout + DAP, ours"),
    "SWAG": ("SWAG", "SWAG + DAP, ours"),
    "mean-field variational": ("VI", "DAP, ours"),
}
GAP_POSTERIORS = {
    "ensemble": "ensemble",
    "Laplace, all weights": "Laplace",
    "mean-field variational": "VI",
    "the same, without a MAP network to start from": "VI from scratch",
}
ADJUSTMENTS = {  # label: row, and the score that it reports doubt by
    "none": ("VI", "entropy"),
    "`Inflate()`, the default": ("DAP, ours", "entropy"),
    "`Transport()`": ("DAP, ours, by Transport", "entropy"),
    "`Reweight()`, the paper": ("DAP, paper's", "confidence"),
    "`Reweight(complete=True)`": ("DAP, paper's, completed", "entropy"),
    "`Reweight(smooth=True)`": ("DAP, paper's, Pareto-smoothed", "confidence"),
    "`MomentMatched()`": ("DAP, paper's, moments matched", "confidence"),
}
SCORES = {
    "entropy of the posterior alone": ("VI", "entropy"),
    "nearest neighbour, features": ("kNN, features", "score"),
    "nearest neighbour, normalised features": ("kNN, normalised features", "score"),
    "Mahalanobis": ("Mahalanobis", "score"),
    "class-conditional Gaussian (DDU)": ("DDU", "score"),
    "dapcal's distance: the larger of features and inputs": ("DAP, ours", "distance"),
    "dapcal's OOD score: entropy and distances together": ("DAP, ours", "OOD score"),
}


def choosing_page(text: str, folder: Path) -> str:
    """The page with every table between `<!-- table: name -->` and `<!-- end of table -->` made anew."""
    names = re.findall(table_begin(r"(\w+)"), text)
    if set(names) != set(TABLES):
        raise ValueError(f"Expected the tables {sorted(TABLES)} in the page, got {sorted(names)}; add their markers")
    for name in names:
        text = replaced(text, table_begin(name), TABLE_END, f"\n{TABLES[name](folder)}\n")
    return text


def posteriors(folder: Path) -> str:
    """Detection and likelihood of every posterior on images, alone → with distance, and what it costs to fit."""
    images = _images(folder)
    toys = json.loads((folder / "posteriors.json").read_text(encoding="utf-8"))["two moons"]
    head = ["", *(f"{found.settings['inside']}: {what}" for found in images for what in ("AUROC", "NLL")), "seconds"]
    rows = []
    for label, (alone, aware) in POSTERIORS.items():
        cells = [label]
        for found in images:
            cells += [
                _arrow(_auroc(found, alone, "entropy"), _auroc(found, aware, "OOD score"), 1),
                _arrow(_nll(found, alone), _nll(found, aware), 3),
            ]
        rows.append([*cells, f"{toys[label]['fit_seconds']:.1f}"])
    seeds, members = len(images[0].sources[0].seeds), images[0].settings["members"]
    note = (
        f"Alone → with distance, all defaults; means over {seeds} seeds; ensembles of {members}. AUROC (%) for images "
        "of three other data sets, their mean: of the entropy alone, of the OOD score with distance. NLL on the test "
        "set. Seconds to fit it to two moons on one CPU core, given a trained network (an ensemble trains its own)."
    )
    return f"{table(head, rows)}\n\n{note}"


def regression(folder: Path) -> str:
    """Log-likelihood in the gaps of UCI tables, alone → with distance."""
    found = _gap(folder)
    rows = []
    for label, name in GAP_POSTERIORS.items():
        pairs = [(_likelihood(found, one, name), _likelihood(found, one, f"{name} + ours")) for one in found.tables]
        rows.append([label, *(_arrow(before, after, 2) for before, after in pairs)])
    nothing = [found.values(one, "no network", "log_likelihood") for one in found.tables]
    rows.append(["no network", *(decimal(sum(values) / len(values), 2) for values in nothing)])
    note = (
        "Mean test log-likelihood per row where the middle third of one column was left out of training, alone → with "
        "distance. “No network” predicts the mean and variance of the training targets everywhere."
    )
    return f"{table(['', *found.tables], rows)}\n\n{note}"


def adjustments(folder: Path) -> str:
    """What each adjustment of one variational posterior does to detection and to the likelihood."""
    images = _images(folder)
    columns = ("AUROC", "accuracy", "NLL")
    head = ["", *(f"{found.settings['inside']}: {what}" for found in images for what in columns)]
    rows = []
    for label, (name, score) in ADJUSTMENTS.items():
        cells = [label]
        for found in images:
            cells += [
                show(_auroc(found, name, score), 1),
                show(_of(found, name, "accuracy", 100), 1),
                show(_nll(found, name), 3),
            ]
        rows.append(cells)
    seeds = len(images[0].sources[0].seeds)
    note = (
        "The same variational posterior. AUROC (%) of the predictive entropy (of the confidence, where probabilities "
        f"do not sum to one), mean over three other data sets. Means ± standard errors over {seeds} seeds; "
        f"rows without an error have one. {NOTHING}: not run."
    )
    return f"{table(head, rows)}\n\n{note}"


def scores(folder: Path) -> str:
    """Which number tells other images from test images best."""
    images = _images(folder)
    head = ["", *(f"{found.settings['inside']} → {other}" for found in images for other in found.outside), "worst"]
    rows = []
    for label, (name, score) in SCORES.items():
        found = [_auroc(results, name, score, other) for results in images for other in results.outside]
        means = [value.mean for value in found if value is not None]
        rows.append([label, *(decimal(mean, 1) for mean in means), decimal(min(means), 1)])
    note = (
        "AUROC (%), means over the seeds; “worst” is the smallest of the row. The first and the last two rows are of "
        "the variational posterior, the others of a single network. Nothing was chosen by looking at other data sets."
    )
    return f"{table(head, rows)}\n\n{note}"


TABLES: dict[str, Callable[[Path], str]] = {
    "posteriors": posteriors,
    "regression": regression,
    "adjustments": adjustments,
    "scores": scores,
}


def _auroc(found: ImageResults, name: str, score: str, other: str | None = None) -> Number | None:
    """Per cent, for one other data set or the mean over all of them."""
    if name not in found.rows:
        return None
    others = found.outside if other is None else (other,)
    return _mean([found.rows[name].values("ood", score, one, "auroc") for one in others])


def _mean(values: Sequence[Sequence[float | None]]) -> Number | None:
    """Over data sets under every seed, then over seeds, in per cent."""
    by_seed = [[value for value in seed if value is not None] for seed in zip(*values, strict=True)]
    return number([sum(seed) / len(seed) for seed in by_seed], 100)


def _nll(found: ImageResults, name: str) -> Number | None:
    return _of(found, name, "nll")


def _of(found: ImageResults, name: str, metric: str, scale: float = 1.0) -> Number | None:
    row: Row | None = found.rows.get(name)
    return None if row is None else number(row.values("test", metric), scale)


def _likelihood(found: GapResults, name: str, row: str) -> Number | None:
    return number(found.values(name, row, "log_likelihood"))


def _arrow(before: Number | None, after: Number | None, digits: int) -> str:
    return " → ".join(NOTHING if value is None else decimal(value.mean, digits) for value in (before, after))


def _images(folder: Path) -> list[ImageResults]:
    found = [read_images(folder, name) for name in COMPARED]
    return [results for results in found if results is not None]


def _gap(folder: Path) -> GapResults:
    found = read_gap(folder)
    if found is None:
        raise ValueError(f"Expected the results of uci-gap in {folder}; run `dapcal reproduce uci-gap`")
    return found


if __name__ == "__main__":
    results, page = (Path(argument) for argument in sys.argv[1:])
    write_text(page, choosing_page(page.read_text(encoding="utf-8"), results))
