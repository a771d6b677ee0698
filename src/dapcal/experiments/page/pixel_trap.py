"""The table of docs/choosing.md on CIFAR-10's trap, made from the files that benchmarks/pixel_trap.py has written.

Run: python -m dapcal.experiments.page.pixel_trap results docs/choosing.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from dapcal.experiments.page.cells import decimal, table
from dapcal.experiments.page.markers import TABLE_END, replaced, table_begin
from dapcal.experiments.records import DEFAULTS
from dapcal.files import write_text

OUTLIERS = {"svhn": "SVHN", "cifar100": "CIFAR-100"}


class Compared(NamedTuple):
    """One posterior of one run, against one set of outliers; AUROC in per cent."""

    run: str
    row: dict[str, Any]
    outliers: str

    @property
    def gain(self) -> float:
        """AUROC of the score minus that of the entropy."""
        return self.row["score"][self.outliers] - self.row["entropy"][self.outliers]

    @property
    def error(self) -> float:
        """Its standard error, over test images."""
        return self.row["gain_error"][self.outliers]


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The runs by name, the weakest network first."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("pixel-trap*.json")]
    return {_name(found["settings"]): found for found in sorted(files, key=_accuracy)}


def compared(runs: dict[str, dict[str, Any]]) -> list[Compared]:
    """Every number that could have become worse."""
    return [Compared(name, row, far) for name, run in runs.items() for row in run["rows"] for far in OUTLIERS]


def pixel_trap_page(text: str, folder: Path) -> str:
    """The page with its table made anew."""
    return replaced(text, table_begin("pixel trap"), TABLE_END, f"\n{_table(read(folder))}\n")


def _table(runs: dict[str, dict[str, Any]]) -> str:
    head = ["network", "posterior, seed", "spaces in", "accuracy"]
    head += [f"{name}: {what}" for name in OUTLIERS.values() for what in ("entropy", "OOD score", "difference")]
    rows = [_cells(name, row) for name, run in runs.items() for row in run["rows"]]
    numbers = compared(runs)
    lower = [one for one in numbers if one.gain < 0]
    clear = [one for one in lower if one.gain < -2 * one.error]
    inside = sum("inputs" in [*row["distances"], *row["further"]] for run in runs.values() for row in run["rows"])
    made = "; ".join(_made(name, run) for name, run in runs.items())
    words = (
        f"AUROC (%); differences ± standard errors over images. Pixels are in: {inside} of {len(rows)} times. The "
        f"score is below the entropy in {len(lower)} of {len(numbers)} cases, in {len(clear)} of them by more than two "
        f"standard errors. {made}."
    )
    return f"{table(head, rows, words=3)}\n\n{words}"


def _cells(name: str, row: dict[str, Any]) -> list[str]:
    cells = [name, f"{row['posterior']}, {row['seed']}", ", ".join([*row["distances"], *row["further"]]) or "none"]
    cells.append(decimal(100 * row["accuracy"], 1))
    for far in OUTLIERS:
        one = Compared(name, row, far)
        cells += [decimal(row[kind][far], 1) for kind in ("entropy", "score")]
        cells.append(f"{decimal(one.gain, 1, sign=True)} ± {decimal(one.error, 1)}")
    return cells


def _made(name: str, run: dict[str, Any]) -> str:
    settings, where = run["settings"], run["environment"]
    trained = f"{settings['train']:,} images, {settings['epochs']} epochs, {settings['test']:,} test images"
    device = where["device"].replace("cpu", "CPU")
    earlier = "" if where["defaults"] == DEFAULTS else ", with earlier weights of the pieces"
    return f"{name}: {trained}, {device}, torch {where['torch']}, {run['seconds']:.0f} s{earlier}"


def _name(settings: dict[str, Any]) -> str:
    return f"width {settings['width']}{', augmented' if settings['augment'] else ''}"


def _accuracy(found: dict[str, Any]) -> float:
    return min(row["accuracy"] for row in found["rows"])


if __name__ == "__main__":
    results, page = map(Path, sys.argv[1:])
    write_text(page, pixel_trap_page(page.read_text(encoding="utf-8"), results))
