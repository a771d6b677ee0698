"""Runs experiments and writes what they give: a JSON file, figures, one page."""

from __future__ import annotations

import html
import json
from pathlib import Path

from dapcal.experiments.records import Experiment, Outcome, Progress
from dapcal.files import complete_or_absent, remove_parts, write_text


def run_and_write(name: str, experiment: Experiment, folder: Path, seed: int, progress: Progress) -> Outcome:
    """Run one experiment and write `name.json` and its figures; every file is complete or absent."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_parts(folder)
    outcome = experiment.run(seed, progress)
    for picture in outcome.pictures:
        with complete_or_absent(folder / f"{name}-{picture.name}.png") as part:
            picture.figure.savefig(part, format="png")
    write_text(folder / f"{name}.json", json.dumps(outcome.numbers, indent=1, allow_nan=True) + "\n")
    return outcome


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
