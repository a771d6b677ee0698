"""The sections of a report, each an answer to a question of its reader."""

from __future__ import annotations

import math

from dapcal.report import charts, words
from dapcal.report.findings import Findings
from dapcal.report.histograms import MOST_SAMPLED, Histogram
from dapcal.report.markup import Captioned, figures, items, legend, paragraph, table, tag, text
from dapcal.report.numbers import number, percent
from dapcal.report.quality import ComparedClasses, ComparedNumbers


def quality(findings: Findings) -> str:
    """How good is it?"""
    lead = "“Before” is the model as it was, “after” the same model with distance taken into account."
    heads = ("", "before", "after", "should be")
    rows = words.rows_of_numbers(findings)
    return (
        paragraph(f"{lead} {words.judged_on(findings)}")
        + table("Quality on held-out examples", heads, rows)
        + paragraph(words.price(findings), "small")
    )


def calibration(findings: Findings) -> str:
    """Does it know how good it is?"""
    found = findings.quality
    drawn = _reliability(found) if isinstance(found, ComparedClasses) else _coverage(found, findings.judged)
    return drawn + paragraph(words.judged_briefly(findings), "small")


def _reliability(found: ComparedClasses) -> str:
    lead = (
        "When it says 80 %, is it right in 80 of 100 cases? Dots on the dashed line mean yes; below it the model is "
        "overconfident. The bars through the dots span what chance may do. Underneath: how many examples each dot "
        "stands for."
    )
    before, after = (f"Expected calibration error {number(each.ece, 2)}." for each in found)
    return paragraph(lead) + figures(
        [
            Captioned(charts.reliability(found.before, "before"), "Before", before),
            Captioned(charts.reliability(found.after, "after"), "After", after),
        ]
    )


def _coverage(found: ComparedNumbers, count: int) -> str:
    lead = (
        "Of intervals that promise 80 %, do 80 of 100 hold the true value? A line on the dashed one means yes; below "
        "it intervals are too narrow. The grey bands span what chance may do."
    )
    deciles = "In their predicted distributions. Even bars are right; a hump means too cautious, a bowl too sure."
    return (
        paragraph(lead)
        + legend((("before", "before"), ("after", "after")))
        + figures(
            [
                Captioned(charts.coverage(*found, count), "Promised and kept", "Coverage of central intervals."),
                Captioned(charts.pit(*found, count), "Where the true values fall", deciles),
            ]
        )
    )


def plane(findings: Findings) -> str:
    """What it knows, and where; empty where inputs are not two numbers."""
    data = findings.map
    if data is None:
        return ""
    is_classification = findings.subject.is_classification
    name = "confidence" if is_classification else "deviation from missing data"
    told = [words.frame(frame, place == data.chosen) for place, frame in enumerate(data.frames)]
    slider = (
        '<label for="phi-range">How much distance counts (φ)</label>'
        f'<input id="phi-range" type="range" min="0" max="{len(told) - 1}" step="1" value="{data.chosen}">'
        f'<output id="phi-output" for="phi-range">{text(told[data.chosen])}</output>'
    )
    hidden = tag("ul", "".join(tag("li", text(each)) for each in told), id="phi-words", hidden="")
    colours = charts.colour_bar(data, name, is_classification)
    content = charts.plane(data, name) + colours + tag("div", slider, class_="slider") + hidden
    return tag("figure", content + tag("figcaption", text(words.plane(findings, data))), class_="alone")


def away(findings: Findings) -> str:
    """What does it do away from its data?"""
    show = percent if findings.subject.is_classification else number
    sure = "average confidence" if findings.subject.is_classification else "median width of 95 % intervals"
    rows = [
        (each.name, f"{each.examples:,}", percent(each.flagged), percent(each.far), show(each.before), show(each.after))
        for each in (findings.inside, *findings.outside)
    ]
    heads = ("", "examples", "flagged (p ≤ 0.05)", "outside the radius", f"{sure}, before", "after")
    drawn = [
        Captioned(
            charts.histogram(data, f"distance between {data.name}", "radius"),
            f"Distance between {data.name}",
            words.radius(findings, data),
        )
        for data in findings.distances
    ]
    note = "Right of the line an example is flagged. The score adds up the distances and the model’s own doubt."
    if findings.score.line is None:
        note = "Too few held-out examples for a p-value of 0.05, so there is no line."
    drawn.append(Captioned(charts.histogram(findings.score, "OOD score", "p = 0.05"), "Score behind p", note))
    return (
        paragraph(words.behaviour(findings))
        + table("Held-out examples and others", heads, rows)
        + _histogram_legend(findings.distances[0], findings.score)
        + figures(drawn)
        + paragraph(f"{words.samples(findings)} At most {MOST_SAMPLED:,} of each are drawn.", "small")
    )


def selective(findings: Findings) -> str:
    """What if doubtful ones go to a person?"""
    is_classification = findings.subject.is_classification
    name = "share wrong among those kept" if is_classification else "error among those kept"
    lead = (
        "If the examples it is least sure of are handed to a person, how wrong is it on the rest? A curve that falls "
        "towards the left means that its doubt is worth listening to."
    )
    before, after = findings.quality
    chart = charts.selective(before.risk, after.risk, name, is_classification)
    return (
        paragraph(lead)
        + legend((("before", "by the doubt before"), ("after", "by the doubt after")))
        + tag("figure", chart, class_="alone")
        + paragraph(words.judged_briefly(findings), "small")
    )


def phi(findings: Findings) -> str:
    """How φ was chosen."""
    curve, chosen = findings.curve, findings.subject.calibrated.phi
    loss, nll = charts.losses(curve, chosen)
    lead = "One number, φ, says how much distance counts. The one with the smallest calibration loss is taken"
    guard = ", among those that do not make predictions on held-out data worse than the guard allows."
    band = "The grey band adds its standard error, and stays under the guard where a φ is allowed."
    if math.isinf(curve.guard):
        guard = "; no guard keeps predictions on held-out data from getting worse."
        band = "The grey band adds its standard error."
    there = float(curve.nll[(curve.phi - chosen).abs().argmin()])
    rise = f"At the chosen φ it is {number(there)}, without distance {number(curve.base_nll)}."
    return (
        paragraph(lead + guard)
        + figures(
            [
                Captioned(loss, "Calibration loss", "Lower is better. The notes below say on which inputs."),
                Captioned(nll, "Held-out negative log-likelihood", f"{rise} {band}"),
            ]
        )
        + paragraph(
            "The likelihood is that of the half of the held-out data that chooses φ, so it is no test.", "small"
        )
    )


def settings(findings: Findings) -> str:
    """What was decided, and with which numbers."""
    return items(findings.notes) + table("Settings and sizes", (), findings.settings)


def _histogram_legend(*data: Histogram) -> str:
    named = {name: charts.series_of(each, name) for each in data for name, _ in each.samples}
    return legend((class_, name) for name, class_ in named.items())
