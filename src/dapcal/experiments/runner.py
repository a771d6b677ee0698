"""Runs experiments and writes what they give: a JSON file, figures, one page."""

from __future__ import annotations

import html
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from dapcal import __version__
from dapcal.experiments.checkout import NOT_RECORDED, commit
from dapcal.experiments.records import Experiment, Outcome, Run, unfinished
from dapcal.files import complete_or_absent, remove_parts, write_text


def run_and_write(name: str, experiment: Experiment, folder: Path, run: Run) -> Outcome:
    """Run one experiment and write `name.json` and its figures; every file is complete or absent.

    What a long experiment has finished lies in the run's work folder, from which a killed run goes on; it is removed
    when all is written. A run that stops by itself before that writes the numbers that there are, and keeps it.
    The file names the commits of all sittings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_parts(folder)
    run = replace(run, work=run.work / name, kept=folder / name)
    _check_device(run.device)
    before = unfinished(folder / f"{name}.json")
    commits = _check_work(experiment, run)
    outcome = experiment.run(run)
    if before and before["settings"] == json.loads(json.dumps(outcome.numbers.get("settings"))):
        commits = [*before["environment"].get("commit", NOT_RECORDED).split("; "), *commits]
    if "environment" in outcome.numbers:
        outcome.numbers["environment"]["commit"] = "; ".join(dict.fromkeys(commits))
    for picture in outcome.pictures:
        with complete_or_absent(folder / f"{name}-{picture.name}.png") as part:
            picture.figure.savefig(part, format="png")
    write_text(folder / f"{name}.json", as_json(outcome.numbers))
    if outcome.unfinished:
        return outcome
    shutil.rmtree(run.work)
    if not any(run.work.parent.iterdir()):
        run.work.parent.rmdir()
    return outcome


def as_json(numbers: object) -> str:
    """The text of a result file: indented, but every list of plain numbers on one line."""
    text = json.dumps(numbers, indent=1, allow_nan=True, ensure_ascii=False)
    return _STRING_OR_NUMBERS.sub(_on_one_line, text) + "\n"


_STRING_OR_NUMBERS = re.compile(r'"(?:[^"\\]|\\.)*"|\[\s*((?:[-+.\deE]|NaN|Infinity|null|,|\s)+?)\s*\]')


def _on_one_line(found: re.Match[str]) -> str:
    """Strings as they are: what looks like a list inside them is none."""
    return found[0] if found[1] is None else "[" + ", ".join(found[1].replace(",", " ").split()) + "]"


def _check_device(device: str) -> None:
    """Found out now, not by a network that is moved there."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without CUDA
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"Expected a device that torch can use here, got {device}: {reason}; try --device cpu"
        ) from error


def _check_work(experiment: Experiment, run: Run) -> list[str]:
    """Unfinished work is gone on from only where everything that its numbers depend on is the same.

    Returns:
        The commits that it was made from, and that of this run, which may be another.
    """
    told = {"version": __version__, "seed": run.seed, **{option: getattr(run, option) for option in experiment.options}}
    for option in ("jobs", "minutes"):  # change the time it takes, and nothing else
        told.pop(option, None)
    told = json.loads(json.dumps(told | {"settings": experiment.settings}, default=str))
    mark = run.work / "settings.json"
    run.work.mkdir(parents=True, exist_ok=True)
    remove_parts(run.work)
    begun = [path for path in run.work.iterdir() if path != mark]
    if begun and not mark.exists():  # killed while the work of a finished run was removed
        shutil.rmtree(run.work)
        run.work.mkdir()
        begun = []
    before = json.loads(mark.read_text(encoding="utf-8")) if begun else {}
    commits = before.pop("commits", [NOT_RECORDED]) if begun else []
    if begun and before != told:
        raise ValueError(
            f"{run.work} holds unfinished work with other settings ({mark.name} says which); run it with those, delete "
            "the folder, or name another --out"
        )
    commits = list(dict.fromkeys([*commits, commit()]))
    write_text(mark, json.dumps(told | {"commits": commits}, indent=1))
    return commits


def write_page(folder: Path, outcomes: dict[str, tuple[Experiment, Outcome]]) -> Path:
    """One `index.html` with all figures and their captions."""
    sections = []
    for name, (experiment, outcome) in outcomes.items():
        figures = "\n".join(
            f'<figure><img src="{name}-{p.name}.png" alt="{html.escape(p.caption)}">'
            f"<figcaption>{html.escape(p.caption)}</figcaption></figure>"
            for p in outcome.pictures
        )
        sections.append(
            f"<section><h2>{html.escape(experiment.title)}</h2><p>{html.escape(experiment.text)} "
            f'Numbers: <a href="{name}.json">{name}.json</a>.</p>\n{figures}</section>'
        )
    path = folder / "index.html"
    write_text(path, _PAGE.format(sections="\n".join(sections)))
    return path


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>dapcal: distance-aware priors</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }}
figure {{ margin: 1.5rem 0; }}
img {{ width: 100%; height: auto; background: white; border-radius: 4px; }}
figcaption {{ font-size: 0.9rem; opacity: 0.85; }}
</style></head><body>
<h1>Distance-aware priors</h1>
<p>A Bayesian network that is sure near its data and unsure away from it. Each figure shows the same posterior before
and after its prior is widened with an input's distance from the training inputs.</p>
{sections}
</body></html>
"""
