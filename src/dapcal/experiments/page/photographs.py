"""What the results page says of CIFAR-10 beside its tables: the rule and what it knew, what is missing, collapse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from dapcal.experiments.cifar.task import plan
from dapcal.experiments.page.cells import number, show, table
from dapcal.experiments.page.files import ImageResults

PARTS_OF_COLLAPSE = ("within", "dimensions", "far_stays_far")


def unfinished(results: ImageResults) -> Iterable[str]:
    """Which rows are still to come."""
    missing = [row for source in results.sources for row in source.unfinished]
    if missing:
        seeds = Counter(row.partition(":")[0] for row in missing)
        listed = ", ".join(f"{count} of {seed}" for seed, count in seeds.items())
        yield f"**Not finished.** Rows that are still to come: {listed}."


def about(results: ImageResults) -> Iterable[str]:
    """How inputs are scored, and what was not blind; nothing for other experiments."""
    settings = results.settings
    if "rule" not in settings:
        return
    yield "### How inputs are scored"
    yield (
        "Written down in `src/dapcal/experiments/cifar/plan.toml` before the networks of this run were shown SVHN or "
        f"CIFAR-100: {' '.join(settings['rule'].split())}"
    )
    known = settings["not_blind"]
    yield "What was not blind, and what has been changed since:"
    yield "\n".join(f"- {_told(one)}" for one in (*known, *(one for one in plan()["not_blind"] if one not in known)))


def collapse(results: ImageResults) -> Iterable[str]:
    """Feature collapse of networks, by rows that measured it."""
    rows = [row for row in results.rows.values() if row.values("facts", "collapse", "within")]
    if not rows:
        return
    yield "### Feature collapse"
    yield table(
        ["", "within / between classes", "dimensions", "far stays far"],
        [
            [row.name, *(show(number(row.values("facts", "collapse", part)), 3) for part in PARTS_OF_COLLAPSE)]
            for row in rows
        ],
    )
    yield (
        "Variance of training features within classes over that between their means (0: complete collapse); "
        "participation ratio of their covariance's eigenvalues (number of classes minus one: complete collapse); AUROC "
        "with which distances between features tell pairs of test images that are far apart in pixels from those that "
        "are near (50 %: nothing of it is left)."
    )


def further(results: ImageResults) -> Iterable[str]:
    """What the other tables leave out: AUCPR, calibration error and time of every row, and of what was trained."""
    if "rule" not in results.settings:
        return
    rows = [
        [
            row.name,
            *(show(number(row.values("ood", row.score, name, "aucpr"), 100), 1) for name in results.outside),
            show(number(row.values("test", "ece"), 100), 1),
            show(number(row.values("seconds")), 1),
        ]
        for row in results.rows.values()
    ]
    if rows:
        yield "### AUCPR, calibration error and seconds of every row"
        yield table(["", *(f"AUCPR {name}" for name in results.outside), "ECE", "seconds"], rows)
        trained = _trained(results)
        listed = ", ".join(f"{name} {seconds:g} s" for name, seconds in trained) or "not told"
        yield f"Seconds to fit and score, of what is trained already. Training took, by network: {listed}."
        again = [name for name, count in Counter(name for name, _ in trained).items() if count > 1]
        if again:
            yield (
                f"Trained again, as the run went on where the weights were not: {', '.join(again)}. Rows of VI, SWAG "
                "and the open questions then stand on another training under the same seed than the rows of that "
                "network itself; a GPU does not repeat one bit by bit."
            )


def _trained(results: ImageResults) -> list[tuple[str, float]]:
    """Names and seconds of what was trained, in the order of seeds."""
    records = [
        one["training_seconds"]
        for source in results.sources for run in source.runs
        for several in run.get("units", {}).values() for one in several
    ]  # fmt: skip
    return [told for record in records for told in record.items()]


def _told(one: dict[str, Any]) -> str:
    return f"{one['change'].rstrip('.')}. Seen before: {one['seen']}."
