"""Result files read and merged: for every experiment its rows, each with the file that it comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, eq=False)
class Source:
    """One result file.

    Attributes:
        name: of the file.
        seeds: that it was made with.
        environment: device and versions.
        settings: of the experiment.
        runs: one for each seed, with its rows.
        unfinished: rows that the run was to make and has not made yet.
    """

    name: str
    seeds: tuple[int, ...]
    environment: dict[str, str]
    settings: dict[str, Any]
    runs: Sequence[Mapping[str, Any]] = ()
    unfinished: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Row:
    """What one method said under every seed of one file."""

    name: str
    part: str
    score: str  # the main one
    source: Source
    runs: Sequence[Mapping[str, Any]]

    def values(self, *path: str) -> list[float | None]:
        """A number under every seed, e.g. `values("test", "accuracy")`; empty where the method has none."""
        return [value for run in self.runs if (value := _at(run, path)) is not _MISSING]

    def curve(self, *path: str) -> Any:
        """Of the first seed, which alone has curves; None where there is none."""
        found = _at(self.runs[0], path)
        return None if found is _MISSING else found


@dataclass(frozen=True, eq=False)
class ImageResults:
    """All files of one image experiment.

    Attributes:
        experiment: its name.
        sources: its files, that with the most seeds first.
        rows: by name, each from the first file that has it: seeds of different files are never pooled.
    """

    experiment: str
    sources: tuple[Source, ...]
    rows: dict[str, Row]

    @property
    def settings(self) -> dict[str, Any]:
        """Of the first file."""
        return self.sources[0].settings

    @property
    def outside(self) -> tuple[str, ...]:
        """Names of the OOD sets."""
        return tuple(self.settings["outside"])

    def of_part(self, part: str) -> list[Row]:
        """Rows of one part of the table."""
        return [row for row in self.rows.values() if row.part == part]


def read_images(folder: Path, experiment: str) -> ImageResults | None:
    """An image experiment from all of its files in a folder; None without one."""
    files = [(data, _source(path.name, data)) for path, data in _files(folder, experiment)]
    files.sort(key=lambda file: (-len(file[1].seeds), file[1].name != f"{experiment}.json"))
    if len({(data["settings"]["inside"], *data["settings"]["outside"]) for data, _ in files}) > 1:
        names = ", ".join(source.name for _, source in files)
        raise ValueError(f"Expected the same data sets in all files of {experiment}, got others in {names}; remove one")
    rows: dict[str, Row] = {}
    for data, source in files:
        for name in dict.fromkeys(name for run in source.runs for name in run["rows"]):
            if name not in rows:
                runs = [run["rows"][name] for run in source.runs if name in run["rows"]]
                rows[name] = Row(name, data["parts"][name], data["main_scores"][name], source, runs)
    return ImageResults(experiment, tuple(source for _, source in files), rows) if files else None


def _source(name: str, data: dict[str, Any]) -> Source:
    runs, unfinished = data["runs"], tuple(data.get("unfinished", ()))
    return Source(name, tuple(data["seeds"]), data["environment"], data["settings"], runs, unfinished)


def rows_of(results: ImageResults, source: Source) -> dict[str, Row]:
    """Rows of one file, also those that the page takes from another."""
    return {
        name: Row(name, row.part, row.score, source, runs)
        for name, row in results.rows.items()
        if (runs := [run["rows"][name] for run in source.runs if name in run["rows"]])
    }


@dataclass(frozen=True, eq=False)
class GapResults:
    """The file of the UCI gap experiment: one record for each split and seed."""

    source: Source
    splits: Sequence[Mapping[str, Any]]

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the data sets."""
        return tuple(dict.fromkeys(record["table"] for record in self.splits))

    def values(self, table: str, row: str, metric: str) -> list[float]:
        """A metric of one row in every split of a data set that has it, under every seed."""
        rows = [record["rows"][row] for record in self.splits if record["table"] == table and row in record["rows"]]
        return [row[metric] for row in rows if metric in row]


def read_gap(folder: Path) -> GapResults | None:
    """The UCI gap experiment; None without a file of it."""
    files = _files(folder, "uci-gap")
    if len(files) > 1:
        names = ", ".join(path.name for path, _ in files)
        raise ValueError(f"Expected one file of uci-gap, got {names}; remove all but one")
    for path, data in files:
        source = Source(path.name, tuple(data.get("seeds", [data.get("seed")])), data["environment"], data["settings"])
        return GapResults(source, data["splits"])
    return None


def _files(folder: Path, experiment: str) -> list[tuple[Path, dict[str, Any]]]:
    found = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.json"))]
    return [(path, data) for path, data in found if data.get("experiment") == experiment]


_MISSING = object()


def _at(value: Any, path: Sequence[str]) -> Any:
    for step in path:
        if not isinstance(value, Mapping) or step not in value:
            return _MISSING
        value = value[step]
    return value
