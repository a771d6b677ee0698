"""The least and the greatest value that a target can have: as given, or 0 where no training target is below it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isinf

from dapcal.amounts import amount

Limits = tuple[float | None, float | None]
"""Least and greatest value in the target's own unit; None: there is none."""


@dataclass(frozen=True)
class Bounds:
    """The least and the greatest value of a target, in the network's unit; None: there is none."""

    lower: float | None = None
    upper: float | None = None

    @property
    def both(self) -> tuple[float | None, float | None]:
        """Lower, upper."""
        return self.lower, self.upper


def limits_of(least: float, greatest: float, given: Limits | None, name: str, option: str) -> Limits:
    """Limits as given, if training targets keep them; where none are given, 0 if no training target is below it.

    Args:
        least: of the training targets.
        greatest: likewise.
        given: None: to be found.
        name: what errors call the target.
        option: what they call `given`.
    """
    slack = 1e-6 * (greatest - least)  # of float32
    if given is None:
        return (0.0 if least >= -slack else None), None
    lower, upper = given
    if lower is not None and upper is not None and not lower < upper:
        raise ValueError(f"Expected {option} as least,greatest, got {lower:.15g},{upper:.15g}; exchange them")
    if (lower is not None and least < lower - slack) or (upper is not None and greatest > upper + slack):
        raise ValueError(
            f"{name} goes from {amount(least, 6)} to {amount(greatest, 6)}, beyond {option}; correct those rows, or "
            "widen them"
        )
    return given


def in_network_unit(limits: Limits, standardised: Callable[[float], float]) -> Bounds:
    """The same in the unit that the network learns; an infinite one is none."""
    ends = (None if end is None else standardised(end) for end in limits)
    return Bounds(*(None if end is None or isinf(end) else end for end in ends))
