"""The cases of the no-harm benchmark, read from `cases.toml`: what is run is what was written down before."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

Data = dict[str, Any]
"""Settings of one data set."""
FILE = Path(__file__).parent / "cases.toml"


class Case(NamedTuple):
    """A posterior on a data set."""

    data: str
    posterior: str
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """As tables and `--parts` have it."""
        return f"{self.data}: {self.posterior}"


@dataclass(frozen=True)
class Plan:
    """The benchmark as data.

    Attributes:
        settings: the file as it is; the result file repeats it.
    """

    settings: dict[str, Any] = field(default_factory=lambda: tomllib.loads(FILE.read_text(encoding="utf-8")))

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        """In the order of the file."""
        return tuple(
            Case(given["data"], posterior, tuple(given.get("seeds", self.settings["seeds"])))
            for given in self.settings["cases"]
            for posterior in given["posteriors"]
        )

    def of(self, data: str) -> Data:
        """What the file says of a data set, beside what it says of all."""
        common = {name: value for name, value in self.settings.items() if name not in ("data", "cases")}
        return {**common, "name": data, **self.settings["data"][data]}

    def chosen(self, parts: tuple[str, ...] | None, seeds: int | None) -> tuple[Case, ...]:
        """Cases whose name holds one of some words, with the first few of their seeds.

        Args:
            parts: such as "digits: one network", "gap" or "SWAG"; None for all.
            seeds: at most; None for all.
        """
        odd = [part for part in parts or () if not any(part in case.name for case in self.cases)]
        if odd:
            known = ", ".join(case.name for case in self.cases)
            raise ValueError(f"Expected parts of the names of cases, got {', '.join(odd)}; there are {known}")
        if seeds is not None and seeds < 1:
            raise ValueError(f"Expected `seeds` >= 1, got {seeds}")
        return tuple(
            case._replace(seeds=case.seeds[:seeds])
            for case in self.cases
            if parts is None or any(part in case.name for part in parts)
        )
