"""docs/performance.md with its figures: speed and memory beside other libraries, from results/performance.json.

Run: python -m dapcal.experiments.page.performance results docs
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dapcal.experiments.page.cells import NOTHING, decimal, table
from dapcal.experiments.page.drawings import Drawing, save
from dapcal.experiments.page.markers import TABLE_END, replaced, table_begin
from dapcal.experiments.page.performance_figures import ratios, scaling
from dapcal.experiments.page.performance_large import large
from dapcal.experiments.performance import Limit, Line, Row, Spread, from_plain, spread
from dapcal.files import complete_or_absent, write_text

TITLES = {  # question in the file: heading, what was done
    "laplace": ("Last-layer Laplace", "A Kronecker-factored posterior of the last layer: fitted, then predicting."),
    "nearest": ("Nearest neighbours", "Exact answers; the index is built before, but for the rows of memory."),
    "approximate": ("Approximate neighbours", "Beside our own exact search; d0 by a radius of each index's own."),
    "detectors": ("Detectors", "Scores of one network's features."),
    "intervals": ("Intervals", "Split conformal intervals around the same point predictions."),
    "ensembles": ("Predictions of networks", "`Calibrated` beside bare passes: what distance costs."),
    "service": ("The service", "Beside FastAPI with the bare network; client and service share the cores."),
    "predictions": ("`dapcal predict`", "From a file to a file."),
    "members": ("Training members", "An ensemble's members side by side."),
    "files": ("Large files", "Artefacts that hold many training points."),
    "streams": ("Data larger than memory", "Training images that stay on disk."),
    "scaling": ("Sizes", "Time over sizes."),
}
NOT_YET = "Not measured yet."
REASONS: dict[str, dict[str, str]] = {  # question: part of a row's name or peer, and why it misses its limit
    "nearest": {
        "memory of": "Products of many queries with many points are held before the smallest are taken, in blocks of "
        "up to `memory` (256 MiB; a smaller one takes less, and longer)",
    },
    "detectors": {
        "memory of distance": "As above: products of many queries with many points, in blocks",
    },
    "ensembles": {
        "predictions, ensemble of five, LeNet-5, probabilities": "Both take half a MiB, so that one allocation more "
        "or less decides",
        "predictions, ensemble of five, LeNet-5, exact": "Distances need the training points and their products with "
        "the inputs in memory; the peer answers without",
    },
    "service": dict.fromkeys(
        ("median latency", "connections", "batches of", "memory of the process"),
        "A row is compared with 8,000 others in spaces of 320, 320 and 40 numbers, boosted trees are asked beside the "
        "networks, and columns are checked; the peer runs small networks alone",
    ),
    "predictions": {
        "distances from": "About a fifth of the processor's time is boosted trees, a fifth distances even so, and "
        "a sixth checks of columns",
        "Parquet": "Beside searches and networks, boosted trees are asked, columns are checked and unusual ones named",
    },
    "members": {
        "": "Five products of small matrices take longer than one, whatever is saved around them",
    },
}


class Found(NamedTuple):
    """What the result file holds."""

    rows: dict[str, list[Row]]  # by question
    lines: list[Line]
    about: Mapping[str, Any]  # everything, as it is in the file


class Page(NamedTuple):
    """The text, and the figures that it shows."""

    text: str
    drawings: list[Drawing]


def read(folder: Path) -> Found:
    """The file of `make bench`; what is missing is everything where there is none."""
    path = folder / "performance.json"
    if not path.exists():
        return Found({}, [], {"questions": {}, "missing": list(TITLES)})
    about = json.loads(path.read_text(encoding="utf-8"))
    questions = about["questions"]
    rows = {name: [from_plain(row) for row in own.get("rows", ())] for name, own in questions.items()}
    lines = [Line(**line) for own in questions.values() for line in own.get("lines", ())]
    return Found({name: own for name, own in rows.items() if own}, lines, about)


def performance_page(text: str, folder: Path) -> Page:
    """The page with its tables and figures made anew."""
    found = read(folder)
    compared, grown = ratios(found.rows, TITLES), scaling(found.lines)
    blocks = {
        "performance-verdict": _verdict(found),
        "performance-ratios": _shown(compared) if found.rows else NOT_YET,
        "performance-rows": "\n\n".join(_section(name, rows) for name, rows in found.rows.items()) or NOT_YET,
        "performance-scaling": f"{_shown(grown)}\n\n{_slopes(found.lines)}" if found.lines else NOT_YET,
        "performance-large": large(folder),
        "performance-environment": _environment(found.about) if found.about["questions"] else NOT_YET,
    }
    for name, content in blocks.items():
        text = replaced(text, table_begin(name), TABLE_END, f"\n{content}\n")
    drawings = {compared: bool(found.rows), grown: bool(found.lines)}
    return Page(text, [drawing for drawing, is_shown in drawings.items() if is_shown])


def write(results: Path, docs: Path) -> None:
    """`performance.md` with its figures."""
    path = docs / "performance.md"
    page = performance_page(path.read_text(encoding="utf-8"), results)
    for drawing in page.drawings:
        with complete_or_absent(docs / f"{drawing.name}.png") as part:
            save(drawing, part)
    write_text(path, page.text)


def _verdict(found: Found) -> str:
    """How many rows keep to their limit, and why the others do not."""
    asked = ", ".join(TITLES[name][0] for name in found.about["missing"])
    missing = f"\n\n**Not measured yet:** {asked}. `make bench` goes on with these." if asked else ""
    limited = [row for own in found.rows.values() for row in own if row.limit is not None]
    missed = [(name, row) for name, own in found.rows.items() for row in own if row.met is False]
    words = f"{len(limited)} rows have a limit; {len(limited) - len(missed)} keep to it"
    if not missed:
        return f"{words}.{missing}"
    return "\n".join([f"{words}. Those that do not:", "", *(_miss(*pair) for pair in missed)]) + missing


def reason_of(question: str, row: Row) -> str:
    """Why a row misses its limit, as far as that was looked into; empty where not."""
    told = REASONS.get(question, {})
    return next((why for part, why in told.items() if part in f"{row.name}, {row.peer}"), "")


def _miss(question: str, row: Row) -> str:
    beside = f", beside {row.peer}" if row.peer else ""
    reached = _ratio(row.ratio) if row.limit is not None and row.limit.of == "ratio" else _amount(row.ours, row.unit)
    reason = f" {why}." if (why := reason_of(question, row)) else ""
    parts = ", ".join(f"`{part}` {100 * share:.0f} %" for part, share in row.profile.items())
    profile = f" Where our time goes: {parts}." if parts else ""
    return f"- **{row.name}**{beside}: {reached}, {_limit(row.limit, row.unit)} allowed.{reason}{profile}"


def _section(name: str, rows: Sequence[Row]) -> str:
    title, words = TITLES[name]
    head = ["", "ours", "beside", "theirs", "ratio (range)", "limit", ""]
    cells = [
        [
            row.name,
            _amount(row.ours, row.unit),
            row.peer or NOTHING,
            _amount(row.theirs, row.unit) if row.theirs else NOTHING,
            _ratio(row.ratio),
            _limit(row.limit, row.unit),
            {True: "✓", False: "✗", None: ""}[row.met],
        ]
        for row in rows
    ]
    notes = "\n".join(dict.fromkeys(f"- {row.name}: {row.note}." for row in rows if row.note))
    return "\n\n".join(part for part in (f"### {title}", words, table(head, cells), notes) if part)


def _amount(values: Sequence[float], unit: str) -> str:
    return f"{amount(spread(list(values)).median)} {unit}"


def amount(value: float) -> str:
    """Three digits of a number, thousands apart.

    >>> amount(0.012345), amount(3.14159), amount(123456.0), amount(-0.001)
    ('0.0123', '3.14', '123,000', '−0.001')
    """
    shown = f"{float(f'{value:.3g}'):,.10f}".rstrip("0").rstrip(".")
    return shown.replace("-", "−")


def _ratio(found: Spread | None) -> str:
    if found is None:
        return NOTHING
    digits = 2 if found.median < 10 else 1
    return f"{decimal(found.median, digits)} ({decimal(found.least, digits)} to {decimal(found.most, digits)})"


def _limit(limit: Limit | None, unit: str) -> str:
    if limit is None:
        return NOTHING
    own = "" if limit.of == "ratio" else f" {unit}"
    return f"{'≥' if limit.least else '≤'} {amount(limit.value)}{own}"


def _slopes(lines: Sequence[Line]) -> str:
    overs = list(dict.fromkeys(line.over for line in lines))
    names = list(dict.fromkeys(line.name for line in lines))
    known = {(line.name, line.over): line for line in lines}
    cells = [
        [name, *(decimal(known[name, over].slope, 2) if (name, over) in known else NOTHING for over in overs)]
        for name in names
    ]
    return table(["slope over", *overs], cells)


def _environment(about: Mapping[str, Any]) -> str:
    own = about["environment"]
    versions = ", ".join(f"{name} {own[name]}" for name in ("dapcal", "python", "torch", "numpy"))
    peers = ", ".join(f"{name} {version}" for name, version in about["peers"].items())
    questions = about["questions"].values()
    commits = ", ".join(dict.fromkeys(one["settings"]["commit"] for one in questions))
    runs = " or ".join(dict.fromkeys(str(one["settings"]["repeats"]) for one in questions))
    loads = [load for one in questions for load in one["load"]]
    minutes = sum(one["seconds"] for one in questions) / 60
    return (
        f"{own['processor']}, {own['cores']} cores, device {own['device']}; {versions}; {peers}. Commit {commits}; "
        f"{runs} runs of everything, {minutes:.0f} minutes in all. Processes that wanted a core (load average): "
        f"{min(loads):.1f} to {max(loads):.1f}; beyond {own['cores']} others were at work, and ratios are worth more "
        "than seconds."
    )


def _shown(drawing: Drawing) -> str:
    return f"![{drawing.caption.partition('. ')[0]}]({drawing.name}.png)\n\n*{drawing.caption}*"


if __name__ == "__main__":
    write(*map(Path, sys.argv[1:]))
