"""docs/networks.md, the table of networks that work, made from the file that benchmarks/networks.py has written.

Run: python -m dapcal.experiments.page.networks results docs/networks.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dapcal.experiments.page.cells import table
from dapcal.experiments.page.markers import TABLE_END, replaced, table_begin
from dapcal.files import write_text

WORKS, NOTHING = "works", "–"


def read(folder: Path) -> dict[str, Any]:
    """The file with all kinds of networks."""
    return json.loads((folder / "networks.json").read_text(encoding="utf-8"))


def networks_page(text: str, folder: Path) -> str:
    """The page with its table made anew."""
    return replaced(text, table_begin("networks"), TABLE_END, f"\n{_table(read(folder))}\n")


def _table(found: dict[str, Any]) -> str:
    steps, rows = found["steps"], found["rows"]
    said: dict[str, int] = {}  # sentences and their numbers, in order
    cells = []
    for name, row in rows.items():
        own = [_cell(row["steps"][step], said) for step in steps]
        layer = row["features"]
        cells.append([name, f"`{layer}`" if layer != NOTHING else layer, *own])
    works = sum(all(outcome == WORKS for outcome in row["steps"].values()) for row in rows.values())
    words = (
        f"{len(rows)} kinds of networks; {works} of them work in every step (✓). A number is the sentence below that a "
        f"step is refused with, a dash a step that was not reached. Made with torch {found['environment']['torch']}."
    )
    sentences = "\n".join(f"{number}. {_safe(sentence)}" for sentence, number in said.items())
    head = ["network", "features: what enters", *steps]
    return f"{words}\n\n{table(head, cells, words=2)}\n\nRefused with:\n\n{sentences}"


def _cell(outcome: str, said: dict[str, int]) -> str:
    if outcome == WORKS:
        return "✓"
    return outcome if outcome == NOTHING else str(said.setdefault(outcome, len(said) + 1))


def _safe(sentence: str) -> str:
    """A sentence of an error as text of a page."""
    return sentence.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


if __name__ == "__main__":
    results, page = map(Path, sys.argv[1:])
    write_text(page, networks_page(page.read_text(encoding="utf-8"), results))
