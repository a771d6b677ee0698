"""A network's predictions, written batch by batch to a CSV file or as arrays to an npz file."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dapcal.files import complete_or_absent
from dapcal.models.columns import Columns, flat
from dapcal.models.formulas import Formulas
from dapcal.models.model import Write

SUFFIXES = (".csv", ".npz")


@contextmanager
def writer(path: Path, classes: Sequence[str], formulas: Formulas | None = None) -> Iterator[Write]:
    """A function that appends rows to the file, which appears when all is well."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"Expected --out as a {' or '.join(SUFFIXES)} file, got {path}")
    with complete_or_absent(path) as part:
        if path.suffix.lower() == ".csv":
            with part.open("w", encoding="utf-8", newline="") as text:
                yield _to_csv(csv.writer(text, lineterminator="\n"), classes, formulas)
        else:
            batches: list[Columns] = []
            yield _to_list(batches)
            joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
            _savez(part, joined | ({"classes": np.asarray(classes)} if classes else {}))


def _to_csv(rows: Any, classes: Sequence[str], formulas: Formulas | None) -> Write:
    begun = False

    def write(beside: Mapping[str, Any], columns: Columns) -> int:
        nonlocal begun
        if formulas is not None:
            beside, columns = formulas.cells(beside, columns)
        texts = {name: _texts(values) for name, values in flat({**beside, **columns}, classes).items()}
        if not begun:
            rows.writerow(texts)
            begun = True
        lines = list(zip(*texts.values(), strict=True))
        rows.writerows(lines)
        return len(lines)

    return write


def _to_list(batches: list[Columns]) -> Write:
    def write(beside: Mapping[str, Any], columns: Columns) -> int:
        batches.append({**beside, **columns})
        return len(columns["prediction"])

    return write


def _texts(values: np.ndarray) -> list[str]:
    """The shortest texts that read back as the same numbers; true and false in small letters."""
    return [str(value).lower() if values.dtype == bool else str(value) for value in values]


def _savez(path: Path, arrays: Columns) -> None:
    """As numpy.savez, which knows no array named `file`."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, values in arrays.items():
            plain = values.astype(str) if values.dtype == object else values  # objects would be pickled
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, plain, allow_pickle=False)
