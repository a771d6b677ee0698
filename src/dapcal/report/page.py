"""The page: sections in the order of a reader's questions, in one document that loads nothing."""

from __future__ import annotations

import base64
import hashlib

from dapcal.report import headline
from dapcal.report.examples import Examples
from dapcal.report.kit.markup import cut, paragraph, section, tag, text
from dapcal.report.kit.style import CSS, SCRIPT
from dapcal.report.predictions import quietly
from dapcal.report.questions import (
    accuracy,
    away_from_data,
    column_effects,
    doubtful,
    drift,
    gaps,
    highest_scores,
    how_sure,
    new_amounts,
    new_categories,
    new_classes,
    new_quality,
    phi,
    plane,
    settings,
    weights,
)


@quietly()
def page(examples: Examples) -> str:
    """The whole HTML file."""
    good, sure, away = accuracy.measure(examples), how_sure.measure(examples), away_from_data.measure(examples)
    highest = highest_scores.measure(examples)
    answers = [
        ("quality", "How good is it?", accuracy.section(examples, good, sure)),
        ("new-quality", "How good is it on the new data?", new_quality.section(examples)),
        (
            "new-classes",
            "Does it tell the classes apart?",
            new_classes.section(examples, new_classes.measure(examples)),
        ),
        ("new-amounts", "How near are its predictions?", new_amounts.section(examples, new_amounts.measure(examples))),
        ("new-categories", "Do intervals hold in every category?", new_categories.section(examples)),
        ("calibration", "Does it know how good it is?", how_sure.section(examples, sure)),
        ("columns", "What does it look at?", column_effects.section(examples, column_effects.measure(examples))),
        ("plane", "What it knows, and where", plane.section(examples, plane.measure(examples))),
        ("away", "What does it do away from its data?", away_from_data.section(examples, away)),
        ("drift", "Which columns are not what they were?", drift.section(examples)),
        ("highest-scores", highest_scores.heading(examples), highest_scores.section(examples, highest)),
        ("selective", "What if doubtful ones go to a person?", doubtful.section(examples, doubtful.measure(examples))),
        ("gaps", "What does distance do to predictions?", gaps.section(gaps.measure(examples))),
        ("phi", "How φ was chosen", phi.section(examples, phi.measure(examples))),
        ("diagnostics", "Can the computation be trusted?", weights.section(examples, weights.measure(examples))),
        ("settings", "Notes and settings", settings.section(examples, settings.measure(examples))),
    ]
    answers = [answer for answer in answers if answer[2]]
    title = examples.subject.title
    lead = (
        headline.what(examples.subject),
        headline.how_good(examples, good, sure),
        headline.how_far(examples, away),
    )
    header = _header(title, " ".join(lead), headline.in_short(examples, sure, away), answers)
    return _document(title, header, tag("main", "".join(section(*answer) for answer in answers)))


def _document(title: str, header: str, main: str) -> str:
    """Nothing may be loaded from anywhere, and no script may run but the page's own."""
    policy = (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src 'sha256-{_digest(CSS)}'; script-src 'sha256-{_digest(SCRIPT)}'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n{header}\n{main}\n"
        f"{tag('footer', 'This page is one file and loads nothing.')}\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _header(title: str, lead: str, in_short: str, answers: list[tuple[str, str, str]]) -> str:
    links = "".join(tag("li", tag("a", text(heading), href=f"#{name}")) for name, heading, _ in answers)
    button = '<button id="theme" type="button" hidden>Dark colours</button>'
    return tag(
        "header",
        tag("div", paragraph("Report on a distance-aware model", "kicker") + button, class_="bar-top")
        + tag("h1", text(cut(title, 120)))
        + paragraph(lead, "lead")
        + tag("p", tag("strong", "In short: ") + text(in_short), class_="short")
        + tag("nav", tag("ul", links), aria_label="Sections"),
    )


def _digest(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
