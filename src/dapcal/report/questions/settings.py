"""Notes and settings: what was decided, and with which numbers."""

from __future__ import annotations

import platform

import torch

from dapcal import __version__
from dapcal.report.examples import Examples
from dapcal.report.kit.markup import items, table
from dapcal.report.kit.numbers import number

Settings = tuple[tuple[str, str], ...]
"""Names and values."""


def measure(examples: Examples) -> Settings:
    """What the model is made of."""
    subject, calibrated = examples.subject, examples.subject.calibrated
    spaces = "; ".join(
        f"{space.name} (no radius)"
        if space.radius is None
        else f"{space.name} (radius {number(space.radius.start, 4)})"
        for space in calibrated.distance.spaces
    )
    return (
        ("φ", number(calibrated.phi, 6)),
        ("factor g(φ)", f"{number(calibrated.factor, 6)}, g = {calibrated.scale!r}"),
        ("adjustment", type(calibrated.adjust).__name__),
        ("posterior", type(calibrated.posterior).__name__),
        ("likelihood", type(calibrated.posterior.likelihood).__name__),
        ("distances between", spaces or "nothing: no space is informative"),
        ("training inputs", f"{len(subject.train.x):,}"),
        ("held-out inputs", f"{len(subject.held_out.x):,}"),
        ("scores that p-values are read from", f"{len(calibrated.evidence.held_out):,}"),
        ("shape of an input", " × ".join(str(side) for side in calibrated.example.shape[1:])),
        ("versions", f"dapcal {__version__}, torch {torch.__version__}, Python {platform.python_version()}"),
    )


def section(examples: Examples, found: Settings) -> str:
    """The notes of the calibration, and a table."""
    return items(examples.subject.calibrated.notes) + table("Settings and sizes", (), found)
