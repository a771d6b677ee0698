"""`make torture`: every part in pieces, each with a seed of its own; an interrupted run goes on with the next piece.

Run: PYTHONPATH=tests python -m torture [--quick] [--seed N] [--out results/torture.json] [--parts kills,service]
     [--jobs 2]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapcal.experiments.records import environment
from dapcal.files import write_text
from torture.pieces import Piece, all_of, summed


@dataclass(frozen=True)
class Part:
    """One file here with a function `run(count, seed) -> Tally`.

    Attributes:
        name: of the file.
        count: what `run` is asked for in all.
        quick: the same of a quick run.
        piece: the most of one call.
    """

    name: str
    count: int
    quick: int
    piece: int

    def pieces(self, is_quick: bool) -> list[int]:
        """Counts of the calls."""
        whole = self.quick if is_quick else self.count
        return [min(self.piece, whole - start) for start in range(0, whole, self.piece)]


PARTS = (
    Part("artefacts", 18_000, 1800, 1000),
    Part("checkpoints", 2000, 200, 500),
    Part("files", 8000, 800, 500),
    Part("service", 50_000, 5000, 50_000),  # in one piece: memory is compared over all of them
    Part("kills", 1000, 60, 200),
    Part("states", 300, 30, 50),
    Part("numerics", 2000, 200, 500),
    Part("validity", 500, 60, 500),  # in one piece: shares are means over all refits
    Part("nodes", 50, 5, 10),
)


def main() -> None:
    options = arguments()
    chosen = [part for part in PARTS if options.parts is None or part.name in options.parts.split(",")]
    record = Record(options.out, {"quick": options.quick, "seed": options.seed})
    asked = [
        (part.name, number, count, options.seed + number)
        for part in chosen
        for number, count in enumerate(part.pieces(options.quick))
    ]
    left = [one for one in asked if not record.has(*one[:2])]
    if not left:  # all is done, so it begins anew
        record.forget([part.name for part in chosen])
        left = asked
    elif len(left) < len(asked):
        print(f"going on with {options.out}", flush=True)
    for name, number, piece, told in all_of(left, options.jobs):
        print(told, flush=True)
        record.add(name, number, piece)
    table, failed_in_all = record.table([part.name for part in chosen])
    print(table)
    sys.exit(failed_in_all > 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of it")
    parser.add_argument("--seed", type=int, default=0, help="of the first piece of every part")
    parser.add_argument("--out", type=Path, default=Path("build/torture.json"), help="what is done so far, and found")
    parser.add_argument("--parts", help="some of them, with commas between")
    parser.add_argument("--jobs", type=int, default=1, help="pieces at a time, each in a process of its own")
    return parser.parse_args()


class Record:
    """The result file: every piece that is done, which the next run of the same kind goes on from, and their sums."""

    def __init__(self, path: Path, kind: dict[str, object]) -> None:
        self.path, self.kind = path, kind
        self.done: dict[str, dict[str, Piece]] = {}
        found = json.loads(path.read_text()) if path.exists() else {}
        if found.get("kind") == kind:
            self.done = {
                part: {number: Piece(*one) for number, one in pieces.items()}
                for part, pieces in found["pieces"].items()
            }

    def has(self, part: str, number: int) -> bool:
        return str(number) in self.done.get(part, {})

    def forget(self, parts: list[str]) -> None:
        self.done = {part: pieces for part, pieces in self.done.items() if part not in parts}

    def add(self, part: str, number: int, piece: Piece) -> None:
        self.done.setdefault(part, {})[str(number)] = piece
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json.dumps(self.found(), indent=1) + "\n")

    def found(self) -> dict[str, Any]:
        """What the file holds: pieces, their sums by part, their commits, and how much of each part is missing."""
        sums, missing = {}, {}
        for part in PARTS:
            pieces, counts = self.done.get(part.name, {}), part.pieces(bool(self.kind["quick"]))
            if pieces:
                sums[part.name] = summed(pieces.values())
            if left := sum(count for number, count in enumerate(counts) if str(number) not in pieces):
                missing[part.name] = [left, sum(counts)]
        commits = sorted({piece.commit for pieces in self.done.values() for piece in pieces.values()})
        found = {"experiment": "torture", "kind": self.kind, "commits": commits, "parts": sums, "missing": missing}
        return found | {"pieces": self.done, "environment": environment()}

    def table(self, parts: list[str]) -> tuple[str, int]:
        """Tried, failed and not tried of every part and in all; and how many failed."""
        found = self.found()["parts"]
        counts = {name: (one["tried"], one["failed"], sum(one["skipped"].values())) for name, one in found.items()}
        counts = {name: counts[name] for name in parts}
        counts["in all"] = tuple(sum(one[place] for one in counts.values()) for place in range(3))
        lines = [f"{name:<12} {tried:>10,} {failed:>8,} {left:>10,}" for name, (tried, failed, left) in counts.items()]
        return "\n".join([f"{'':<12} {'tried':>10} {'failed':>8} {'not tried':>10}", *lines]), counts["in all"][1]


if __name__ == "__main__":
    main()
