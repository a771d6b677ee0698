"""The page of the no-harm benchmark: verdict, dot plot, tables and worst cases, made from results/no-harm.json.

Run: python -m dapcal.experiments.page.no_harm results docs
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dapcal.experiments.no_harm.cases import Plan
from dapcal.experiments.no_harm.summary import COLUMNS, FIRST_SCREEN, LIMITS, Difference, differences
from dapcal.experiments.no_harm.verdict import paired
from dapcal.experiments.page.cells import DOWN, NOTHING, Number, decimal, median, show, table
from dapcal.experiments.page.drawings import Drawing, save
from dapcal.experiments.page.no_harm_figure import dots
from dapcal.experiments.page.no_harm_worst import WHY
from dapcal.files import complete_or_absent, write_text

IN_DISTRIBUTION = (("accuracy", "rmse"), ("nll",), ("ece", "coverage"))
EASY = 98.0  # %: accuracy before, from which classes count as easy
OUTSIDE = (("auroc",), ("fpr95",), ("gap nll",))


class Page(NamedTuple):
    """The text, and its one figure; None before there are results."""

    text: str
    drawing: Drawing | None


def no_harm_page(folder: Path, plan: Plan | None = None) -> Page:
    """The page from the result file in a folder, or what is going to be run where there is none."""
    path = folder / "no-harm.json"
    if not path.exists():
        return Page("\n\n".join([*_HEAD, "There are no results yet.", *_cases((plan or Plan()).settings)]) + "\n", None)
    found = json.loads(path.read_text(encoding="utf-8"))
    every = differences(found["cases"])
    drawing = dots(every)
    blocks = [
        *_HEAD,
        *_verdict(found, every),
        f"![{drawing.caption.partition('. ')[0]}]({_file(drawing)})\n\n*{drawing.caption}*",
        *_worst(found, every),
        *_tables(found, every),
        *_not_blind(found["settings"]),
        *_cases(found["settings"]),
        _made_on(found),
    ]
    return Page("\n\n".join(blocks) + "\n", drawing)


def write(results: Path, docs: Path) -> None:
    """`no-harm.md` with its figure."""
    page = no_harm_page(results)
    if page.drawing is not None:
        with complete_or_absent(docs / _file(page.drawing)) as part:
            save(page.drawing, part)
    write_text(docs / "no-harm.md", page.text)


def _verdict(found: dict[str, Any], every: Sequence[Difference]) -> list[str]:
    lines = []
    for column, limit in LIMITS.items():
        own = found["verdict"][column]
        unit, digits = ("nats", 4) if column == "nll" else ("points", 2)
        what = "NLL rises" if column == "nll" else "AUROC falls"
        lines.append(
            f"- **{COLUMNS[column].title.partition(' ')[0]}: {'passes' if own['passes'] else 'does not pass'}.** "
            f"Of {own['tested']} comparisons, {what} by more than {limit:g} {unit} beyond doubt (95 % bound, Holm) in "
            f"{_count(own['harmed'])}; by more than that on average in {_count(own['mean beyond the limit'])}; tested "
            f"alone, beyond doubt, in {_count(own['harmed if tested alone'])}. Mean harm over cases "
            f"{show(Number(own['mean harm'], own['its standard error']), digits, sign=True)} {unit}, median "
            f"{decimal(own['median harm'], digits, sign=True)} (negative = better).{_without(own, unit)}"
        )
    if FIRST_SCREEN in found["verdict"]:
        own = found["verdict"][FIRST_SCREEN]
        lines.append(
            f"- **{FIRST_SCREEN}: {'passes' if own['passes'] else 'does not pass'}.** Mean test NLL over "
            f"{own['seeds']} seeds {decimal(own['before'], 4)} → {decimal(own['after'], 4)}; it may not rise."
        )
    network = _against_network(found["cases"])
    return ["## Verdict", "\n".join([*lines, *_on_easy_classes(every), network])]


def _on_easy_classes(every: Sequence[Difference]) -> list[str]:
    """What doubt costs where nearly every test row is right: small, but the same way nearly everywhere."""
    easy = {one.case for one in every if one.column == "accuracy" and one.before >= EASY}
    harms = [one.harm.mean for one in every if one.column == "nll" and one.case in easy]
    if not harms:
        return []
    rises = sum(harm > 0 for harm in harms)
    mean = paired(harms)
    return [
        f"- On easy classes ({EASY:g} % of test rows right before, or more: {len(harms)} cases) the NLL rises in "
        f"{rises}, by {show(Number(mean.mean, mean.error), 3, sign=True)} nats on average over all of them: there "
        "doubt that is kept, by a last layer or by distance, costs likelihood on rows that are right, and the guard "
        f"lets it cost up to {LIMITS['nll']:g} nats of held-out rows."
    ]


def _without(own: dict[str, Any], unit: str) -> str:
    """What is left without those that had nothing to lose."""
    if not own["without doubt before"] or own["mean harm with doubt before"] is None:
        return ""
    mean, error, _ = own["mean harm with doubt before"].values()
    return (
        f" {own['without doubt before']} of them had an AUROC of 50 before by definition (one network with one noise "
        f"level); the mean over the others is {show(Number(mean, error), 2, sign=True)} {unit}."
    )


def _against_network(cases: dict[str, list[dict[str, Any]]]) -> str:
    """Posteriors that were made around a trained network, held against that network."""
    harms = {
        name: sum(record["after"]["nll"] - record["network"]["nll"] for record in own) / len(own)
        for name, own in cases.items()
        if all("network" in record for record in own)
    }
    higher = [f"{name} ({decimal(harm, 3, sign=True)})" for name, harm in harms.items() if harm > LIMITS["nll"]]
    return (
        f"- Against the trained network itself (of an ensemble its first member), not part of the verdict: of "
        f"{len(harms)} cases {_count(higher)} have a mean NLL that is higher by more than {LIMITS['nll']:g} nats."
    )


def _worst(found: dict[str, Any], every: Sequence[Difference]) -> list[str]:
    """For each column the case with the largest harm, why, and what was decided there."""
    lines = []
    for name, column in COLUMNS.items():
        own = [one for one in every if one.column == name]
        if own:
            worst = max(own, key=lambda one: one.harm.mean)
            if worst.harm.mean > 0:
                why = WHY.get((name, worst.name), "Not looked into yet.")
                known = f"{why} {_known(found['cases'][worst.case])}"
            else:
                known = "So none is worse."
            lines.append(f"- **{column.title}**: {worst.name}, {_change(worst)}. {known}")
    return [
        "## The worst case of each column",
        "In brackets the mean harm ± its standard error, positive = worse.",
        "\n".join(lines),
    ]


def _known(records: Sequence[dict[str, Any]]) -> str:
    """What calibration has decided in a case, in words and numbers."""
    phis = [record["phi"] for record in records]
    spaces = sorted({", ".join(record["spaces"]) or "none" for record in records})
    kinds = sorted({record["adjust"] for record in records})
    rows = records[0]["rows"]
    return (
        f"({' or '.join(kinds)}, φ {decimal(median(phis), 2)} ({decimal(min(phis), 2)} to {decimal(max(phis), 2)}), "
        f"distance in: {' | '.join(spaces)}; {rows[0]} training, {rows[1]} held-out and {rows[2]} test rows.)"
    )


def _tables(found: dict[str, Any], every: Sequence[Difference]) -> list[str]:
    harmed = {(column, name) for column in LIMITS for name in found["verdict"][column]["harmed"]}
    by_row: dict[tuple[str, str], dict[str, Difference]] = {}
    for one in every:
        by_row.setdefault((one.case, one.outliers), {})[one.column] = one

    def cells(own: dict[str, Difference], columns: Sequence[Sequence[str]]) -> list[str]:
        return [
            next((_cell(own[name], (name, own[name].name) in harmed) for name in names if name in own), NOTHING)
            for names in columns
        ]

    near = [[case, *cells(own, IN_DISTRIBUTION)] for (case, outliers), own in by_row.items() if not outliers]
    far = [[case, outliers, *cells(own, OUTSIDE)] for (case, outliers), own in by_row.items() if outliers]
    heads = [
        [" or ".join(COLUMNS[name].title for name in names) for names in part] for part in (IN_DISTRIBUTION, OUTSIDE)
    ]
    return [
        "## In distribution",
        table(["case", *heads[0]], near),
        "Test rows that no part of the case has seen: before → after, in brackets the paired harm ± its standard error "
        "over seeds or splits (positive = worse; of coverage, its distance from 95 %). Test rows of several seeds "
        f"overlap, so errors are those of repeats on one data set. {DOWN}: harmed beyond doubt.",
        "## Outliers",
        table(["case", "outliers", *heads[1]], far, words=2),
        "Before: the entropy of a network or posterior, in regression its epistemic variance; one network with one "
        "noise level has no doubt that depends on the input, so its AUROC is 50 by definition. After: the OOD "
        "score. The NLL of outliers is there where they have targets (gaps), and is not part of the verdict. A table "
        "ensemble is that of `dapcal fit` without trees and without a refit on all rows; before are its members with "
        "their in-domain scaling, before distance.",
    ]  # fmt: skip


def _not_blind(settings: dict[str, Any]) -> list[str]:
    """What the run knew, and what was written down since: a change may be told after the run that it was made for."""
    known = settings["not_blind"]
    since = [one for one in Plan().settings["not_blind"] if one not in known]
    told = [f"- {one['change'].rstrip('.')}. Seen before: {one['seen']}" for one in (*known, *since)]
    nothing = "Nothing: no default and no case has been changed since the table was first seen."
    return ["## Changed after the table had been seen", "\n".join(told) or nothing]


def _cases(settings: dict[str, Any]) -> list[str]:
    rows = []
    for given in settings["cases"]:
        data = settings["data"][given["data"]]
        seeds = ", ".join(map(str, given.get("seeds", settings["seeds"])))
        rows.append([given["data"], ", ".join(given["posteriors"]), ", ".join(data["outliers"]), seeds])
    shares = [f"{100 * settings[name]:g} %" for name in ("test", "held_out")]
    return [
        "## The cases",
        table(["data", "posteriors", "outliers", "seeds"], rows, words=4),
        f"As in `src/dapcal/experiments/no_harm/cases.toml`, which was written before the first run. Networks see "
        f"{settings['steps']} minibatches of {settings['batch_size']}; {settings['members']} members, "
        f"{settings['draws']} draws. Of a table {shares[0]} of the rows test and {shares[1]} calibrate. Nothing is "
        "chosen by test rows or outliers, and no hyperparameter was tuned.",
    ]


def _made_on(found: dict[str, Any]) -> str:
    known = found["environment"]
    versions = ", ".join(f"{tool} {version}" for tool, version in known.items() if tool != "device")
    return (
        f"Made on {known['device']} with {versions}, seed {found['seed']}: {found['seconds'] / 60:.1f} minutes with "
        f"{found['jobs']} processes, {found['processor_seconds'] / 60:.1f} minutes of processor time."
    )


def _cell(one: Difference, harmed: bool) -> str:
    return _change(one) + (f" {DOWN}" if harmed else "")


def _change(one: Difference) -> str:
    digits = COLUMNS[one.column].digits
    shown = show(Number(one.harm.mean, one.harm.error), digits, sign=True)
    return f"{decimal(one.before, digits)} → {decimal(one.after, digits)} ({shown})"


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} ({'; '.join(names)})" if names else "none"


def _file(drawing: Drawing) -> str:
    return f"{drawing.name}.png"


_HEAD = (
    "# No harm",
    "Is calibrating ever worse than what the user had? Small networks and posteriors on images, tables and toys, "
    "before and after `dapcal.calibrate` with all defaults. Made by `make page` from `results/no-harm.json`; to run "
    "it again (for the data see [data.md](data.md)):",
    "```\nexport DAPCAL_DATA=...\ndapcal reproduce no-harm\n```",
)


if __name__ == "__main__":
    write(*(Path(argument) for argument in sys.argv[1:]))
