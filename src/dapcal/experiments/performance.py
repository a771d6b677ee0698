"""Rows and lines of the performance page: what was measured over several runs, beside whom, and what it may be."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple


class Spread(NamedTuple):
    """Of several runs."""

    median: float
    least: float
    most: float


@dataclass(frozen=True)
class Limit:
    """What a row may be, at most or at least.

    Attributes:
        value: of the ratio to the peer, or of our own number.
        of: "ratio" or "ours".
        least: whether `value` is the least that it may be, as for rates.
    """

    value: float
    of: str = "ratio"
    least: bool = False

    def __post_init__(self) -> None:
        if self.of not in ("ratio", "ours"):
            raise ValueError(f'Expected `of` to be "ratio" or "ours", got {self.of!r}')

    def met(self, found: float) -> bool:
        """Whether a number keeps to it."""
        return found >= self.value if self.least else found <= self.value


AS_FAST = Limit(1.0)
"""What every row against a peer is held to where nothing else is asked for."""


@dataclass(frozen=True)
class Row:
    """One line of the page.

    Attributes:
        name: what was done, with its sizes.
        unit: of the numbers, e.g. "s", "MiB", "rows/s".
        ours: our number in every run.
        peer: who else did it.
        theirs: their number in every run; run i of both stood next to each other.
        limit: what it may be; None: the row is there to be known.
        note: what else the page says of it, e.g. how far the answers are apart.
        profile: by part of our time its share, where that was looked at.
    """

    name: str
    unit: str
    ours: list[float]
    peer: str = ""
    theirs: list[float] = field(default_factory=list)
    limit: Limit | None = None
    note: str = ""
    profile: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.ours:
            raise ValueError(f"Expected a number for every run of {self.name!r}, got none; measure it first")
        if bool(self.peer) != bool(self.theirs) or len(self.theirs) not in (0, len(self.ours)):
            raise ValueError(
                f"Expected as many runs of the peer as of ours in {self.name!r} ({len(self.ours)}), got "
                f"{len(self.theirs)} of {self.peer or 'nobody'}; measure both in turns"
            )
        if self.limit is not None and self.limit.of == "ratio" and not self.theirs:
            raise ValueError(f"Expected a peer for the limit of a ratio in {self.name!r}; name one, or limit `ours`")

    @property
    def ratio(self) -> Spread | None:
        """Ours over theirs, run by run; None without a peer."""
        return spread([a / b for a, b in zip(self.ours, self.theirs, strict=True)]) if self.theirs else None

    @property
    def met(self) -> bool | None:
        """Whether the median keeps to the limit; None where there is none."""
        if self.limit is None:
            return None
        held = self.ratio if self.limit.of == "ratio" else spread(self.ours)
        return self.limit.met(held.median) if held is not None else None


@dataclass(frozen=True)
class Line:
    """Seconds over a size, all else fixed.

    Attributes:
        name: what was done, and by whom.
        over: which size, e.g. "training points".
        sizes: ascending.
        seconds: for every size, of every run.
    """

    name: str
    over: str
    sizes: list[int]
    seconds: list[list[float]]

    @property
    def medians(self) -> list[float]:
        """Seconds, one for every size."""
        return [statistics.median(runs) for runs in self.seconds]

    @property
    def slope(self) -> float:
        """By how many powers of ten time grows where the size grows by one, over the larger half of the sizes.

        >>> Line("search", "points", [10, 100, 1000], [[1.0], [1.0], [10.0]]).slope
        1.0
        """
        half = len(self.sizes) // 2
        x = [math.log10(size) for size in self.sizes[half:]]
        y = [math.log10(seconds) for seconds in self.medians[half:]]
        return statistics.linear_regression(x, y).slope


def spread(values: list[float]) -> Spread:
    """Median and range.

    >>> spread([3.0, 1.0, 2.0])
    Spread(median=2.0, least=1.0, most=3.0)
    """
    return Spread(statistics.median(values), min(values), max(values))


def to_plain(row: Row | Line) -> dict[str, Any]:
    """For a result file; what is empty is left out."""
    return {name: value for name, value in asdict(row).items() if value not in ("", None, [], {})}


def from_plain(found: dict[str, Any]) -> Row:
    """A row of a result file.

    >>> row = Row("a", "s", [1.0], "b", [2.0], AS_FAST)
    >>> from_plain(to_plain(row)) == row
    True
    """
    limit = found.get("limit")
    return Row(**found | {"limit": None if limit is None else Limit(**limit)})
