"""The page: sections in the order of a reader's questions, in one document that loads nothing."""

from __future__ import annotations

import base64
import hashlib

from dapcal.report import headline, sections, words
from dapcal.report.findings import Findings
from dapcal.report.markup import items, paragraph, section, tag, text
from dapcal.report.strange_rows import strangest
from dapcal.report.style import CSS, SCRIPT


def page(findings: Findings) -> str:
    """The whole HTML file."""
    answers = [
        ("quality", "How good is it?", sections.quality(findings)),
        ("calibration", "Does it know how good it is?", sections.calibration(findings)),
        ("plane", "What it knows, and where", sections.plane(findings)),
        ("away", "What does it do away from its data?", sections.away(findings)),
        ("strangest", f"Strangest examples: {words.cut(findings.strangest_of)}", strangest(findings)),
        ("selective", "What if doubtful ones go to a person?", sections.selective(findings)),
        ("phi", "How φ was chosen", sections.phi(findings)),
        ("diagnostics", "Can the computation be trusted?", items(words.weights(findings.weights))),
        ("settings", "Notes and settings", sections.settings(findings)),
    ]
    answers = [answer for answer in answers if answer[2]]
    main = tag("main", "".join(section(*answer) for answer in answers))
    return _document(findings.subject.title, _header(findings, answers), main)


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


def _header(findings: Findings, answers: list[tuple[str, str, str]]) -> str:
    subject = findings.subject
    links = "".join(tag("li", tag("a", text(heading), href=f"#{name}")) for name, heading, _ in answers)
    button = '<button id="theme" type="button" hidden>Dark colours</button>'
    sentences = (headline.what(subject), headline.how_good(findings), headline.how_far(findings))
    return tag(
        "header",
        tag("div", paragraph("Report on a distance-aware model", "kicker") + button, class_="bar-top")
        + tag("h1", text(words.cut(subject.title, 120)))
        + paragraph(" ".join(sentences), "lead")
        + tag("p", tag("strong", "In short: ") + text(headline.in_short(findings)), class_="short")
        + tag("nav", tag("ul", links), aria_label="Sections"),
    )


def _digest(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
