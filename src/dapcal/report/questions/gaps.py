"""What distance does to predictions, and why: the choice by regions that were left out of training."""

from __future__ import annotations

from dapcal.calibration.gap_choice import NONE, Gain, GapChoice, words
from dapcal.report.examples import Examples
from dapcal.report.kit.markup import paragraph, table

_KINDS = (("all regions", None), ("middle thirds (interpolation)", "middle"), ("outer thirds (extrapolation)", "outer"))


def measure(examples: Examples) -> GapChoice | None:
    """What was stored with the model."""
    return examples.subject.gaps


def section(choice: GapChoice | None) -> str:
    """The choice in words, and the gains of every adjustment by kind of gap; empty where it was not made."""
    if choice is None:
        return ""
    lead = words(choice)
    along = sum(read.column is not None for read in choice.regions)
    names = list(choice.regions[0].after)
    rows = []
    for told, kind in _KINDS:
        count = sum(kind in (None, read.kind) for read in choice.regions)
        if count:
            gains = (choice.gain(name, kind) for name in names)  # type: ignore[arg-type]
            rows.append((f"{told}, {count}", *map(_cell, gains)))
    means = {NONE: "predictions stay as they are", "Inflate": "the spread grows", "Revert": "the spread grows and the "
             "mean returns to that of the training rows"}  # fmt: skip
    return (
        paragraph(f"{lead[0].upper()}{lead[1:]}. With distance {means.get(choice.chosen, choice.chosen)}.")
        + table("Gain in log predictive over no adjustment, nats a row", ("regions", *names), tuple(rows))
        + paragraph(
            f"Each region is a third of the training rows, {along} along single columns and "
            f"{len(choice.regions) - along} along random directions; models of the same kind were trained without "
            "it, and asked about it. Each region counts once; ± is one standard error over regions. An adjustment is "
            "taken where its gain exceeds it. Middle thirds of single columns have the form of the UCI gap benchmark, "
            "so numbers on that benchmark are no independent test of this choice.",
            "small",
        )
    )


def _cell(gain: Gain) -> str:
    return f"{gain.mean:+.3f} ± {gain.error:.3f}"
