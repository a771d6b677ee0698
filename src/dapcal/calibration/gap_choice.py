"""Which adjustment gains where data are missing: a choice by the log predictive of refits, read region by region.

Every region counts once, by the mean log predictive of its rows. φ of an adjustment maximises the mean over regions. A
richer answer replaces a plainer one where its paired mean gain over regions exceeds its standard error over regions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from dapcal.calibration.regions import Kind
from dapcal.storing import check_fields, fits

NONE = "none"
NEGLIGIBLE = 1e-4  # nats a row: a φ so small that nothing happens gains something, too, and in every region


class Gain(NamedTuple):
    """A paired gain in nats: its mean over regions, and the mean's standard error."""

    mean: float
    error: float

    @property
    def counts(self) -> bool:
        """Whether the gain exceeds its standard error, and is more than nothing."""
        return self.mean > max(self.error, NEGLIGIBLE)


class Step(NamedTuple):
    """An adjustment held against what was chosen before it."""

    name: str
    place: int  # of its best factor
    gain: Gain
    taken: bool


class Read(NamedTuple):
    """What was read in one region, in nats per row."""

    kind: Kind
    column: int | None  # of the inputs, along which it lies; None: a random direction
    rows: int
    none: float  # log predictive without adjustment
    after: dict[str, float]  # with each adjustment, at its own φ


@dataclass(frozen=True)
class GapChoice:
    """What gap cross-validation has chosen, and why.

    Attributes:
        chosen: the adjustment's name; "none" where no adjustment gains.
        regions: what was read in every region.
        held_back: names of adjustments that gained, but not at any φ that the guard allows.
    """

    chosen: str
    regions: tuple[Read, ...]
    held_back: tuple[str, ...] = ()

    def gain(self, name: str, kind: Kind | None = None, over: str = NONE) -> Gain:
        """Of an adjustment over another or none, in regions of one kind or all."""
        own = [read for read in self.regions if kind in (None, read.kind)]
        before, after = ([read.none if n == NONE else read.after[n] for read in own] for n in (over, name))
        return paired(torch.tensor(before, dtype=torch.float64), torch.tensor(after, dtype=torch.float64))

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "regions": [read._asdict() for read in self.regions]}


def from_json(saved: Mapping[str, Any]) -> GapChoice:
    """What `as_json` gave; anything else is refused."""
    regions = tuple(Read(**read) for read in saved["regions"])
    found = GapChoice(saved["chosen"], regions, tuple(saved["held_back"]))
    check_fields(GapChoice, vars(found))
    hints = get_type_hints(Read)
    for read in regions:
        if not all(fits(value, hints[name]) for name, value in read._asdict().items()):
            raise ValueError("a region of gap cross-validation is not described as it should be")
    names = {chosen for chosen in (found.chosen, *found.held_back) if chosen != NONE}
    if not regions or any(not names <= set(read.after) for read in regions):
        raise ValueError("gap cross-validation chose what it did not read")
    return found


def steps(none: Tensor, candidates: Mapping[str, Tensor]) -> list[Step]:
    """Adjustments from plain to rich, each held against the last one that was taken.

    Args:
        none: mean log predictive in every region without adjustment, (R,).
        candidates: with an adjustment, at every factor, (R, M), by its name.
    """
    standing, found = none.double(), []
    for name, values in candidates.items():
        place = int(values.double().mean(0).nan_to_num(nan=-math.inf).argmax())
        gain = paired(standing, values[:, place])
        found.append(Step(name, place, gain, gain.counts))
        if gain.counts:
            standing = values[:, place].double()
    return found


def chosen(found: Sequence[Step]) -> str:
    """The last that was taken, or none."""
    return next((step.name for step in reversed(found) if step.taken), NONE)


def words(choice: GapChoice) -> str:
    """One sentence: what was chosen, and what it gains in gaps of both kinds."""
    count = f"{len(choice.regions)} regions that were left out of training in turn"
    names = [choice.chosen] if choice.chosen != NONE else list(choice.regions[0].after)
    parts = []
    for name in names:
        middle, outer = (choice.gain(name, kind) for kind in ("middle", "outer"))
        parts.append(
            f"{name} gains {_told(choice.gain(name))} nats a row (between the data {_told(middle)}, beyond them "
            f"{_told(outer)})"
        )
    back = [name for name in choice.held_back if name != choice.chosen]
    guard = f"; the guard on held-out rows keeps {' and '.join(back)} from gaining" if back else ""
    answer = "no adjustment" if choice.chosen == NONE else choice.chosen
    return f"gap cross-validation chose {answer}: in {count}, {', '.join(parts)}{guard}"


def _told(gain: Gain) -> str:
    return f"{gain.mean:+.3f} ± {gain.error:.3f}" if math.isfinite(gain.error) else f"{gain.mean:+.3f}"


def paired(before: Tensor, after: Tensor) -> Gain:
    """Mean over regions (R,) of after − before, and its standard error; that of a single region is not known."""
    gains = after.double() - before.double()
    error = float(gains.std()) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
    return Gain(float(gains.mean()), error)
