"""The first words of a report: what the model is, how good it is, and what it does away from its data."""

from __future__ import annotations

import math

from dapcal.models.subject import Subject
from dapcal.report.findings import Behaviour, Findings
from dapcal.report.numbers import number, percent
from dapcal.report.quality import LEVELS, ClassQuality
from dapcal.report.words import cut

_KOLMOGOROV = 1.36  # largest gap times √n that chance exceeds in 5 % of cases
_NO_FLAGS = "none can be flagged, as too few examples were held out for a p-value of 0.05"
_HARDLY = 0.03  # a fall of the confidence, or a relative widening of intervals, that is not worth the name


def what(subject: Subject) -> str:
    """What the model is."""
    shape = subject.calibrated.example.shape[1:]
    inputs = f"inputs of {' × '.join(str(side) for side in shape)} numbers"
    if len(shape) == 1:
        count = len(set(subject.features)) or shape[0]
        kind = "column" if subject.features else "number"
        inputs = f"{count} {kind}{'s' if count > 1 else ''}"
    classes = ""
    if subject.classes:
        named = ", ".join(cut(name, 24) for name in subject.classes[:6])
        classes = f" ({len(subject.classes)} classes: {named}{', …' if len(subject.classes) > 6 else ''})"
    examples = f"{len(subject.train.x):,} examples"
    return f"This model predicts {cut(subject.target)}{classes} from {inputs}, learnt from {examples}."


def how_good(findings: Findings) -> str:
    """Quality on held-out data."""
    after, n = findings.quality.after, findings.judged
    on = f"On {n:,} held-out examples"
    if isinstance(after, ClassQuality):
        gap, error = after.confidence - after.accuracy, _error(after.accuracy, n)
        agrees = "agrees with that, within chance"
        if after.ece > after.ece_by_chance[1]:
            agrees = "agrees with that on average, but not at every level of confidence"
        if abs(gap) > 2 * error:
            agrees = "is higher than that: it is overconfident" if gap > 0 else "is lower than that: it is too cautious"
        return (
            f"{on} it is right {percent(after.accuracy)} of the time (give or take {percent(2 * error)}); its average "
            f"confidence, {percent(after.confidence)}, {agrees}."
        )
    gaps = [observed - level for observed, level in zip(after.observed, LEVELS, strict=True)]
    verdict = "intervals of all levels keep what they promise, within chance"
    if max(map(abs, gaps)) > _KOLMOGOROV / math.sqrt(n):
        verdict = "taken over all levels, intervals are too " + ("wide" if sum(gaps) > 0 else "narrow")
    return (
        f"{on} its error is {number(after.rmse)} (root mean square), and its 95 % intervals hold "
        f"{percent(after.coverage)} of the true values; {verdict}."
    )


def how_far(findings: Findings) -> str:
    """Behaviour away from the data."""
    if findings.is_made_up:
        sets = "; ".join(f"on {_made(each)} {_change(findings, each)}" for each in findings.outside)
        return f"No further data were given, so its behaviour away from the data is shown on made-up inputs: {sets}."
    new = findings.outside[0]
    if findings.score.line is None:
        return f"On {new.examples:,} examples of {cut(new.name)} {_change(findings, new)}; {_NO_FLAGS}."
    whom = "on all of them" if new.flagged_after is None else "on these"
    return (
        f"Of {new.examples:,} examples of {cut(new.name)}, {percent(new.flagged)} are flagged as unlike the training "
        f"data (p ≤ 0.05, as about {percent(0.05)} of ordinary data are); {whom} {_change(findings, _of_flagged(new))}."
    )


def in_short(findings: Findings) -> str:
    """One sentence for someone who reads no other."""
    after, away = findings.quality.after, findings.outside[0]
    unlike = f"on made-up {away.name}" if findings.is_made_up else f"on {cut(away.name)}"
    if isinstance(after, ClassQuality):
        good = f"It is right {percent(after.accuracy)} of the time on data like its training data"
        if away.before - away.after > _HARDLY:
            doubt = f"its confidence falls from {percent(away.before)} to {percent(away.after)} once distance counts"
        else:
            doubt = f"its confidence hardly changes ({percent(away.before)} to {percent(away.after)})"
    else:
        kept = f"hold {percent(after.coverage)} of the true values on data like its training data"
        good = f"Its 95 % intervals, on average ± {number(after.width / 2)}, {kept}"
        ratio = away.after / findings.inside.after
        doubt = f"a typical interval is {number(ratio, 2)} times as wide as there"
        if abs(ratio - 1) <= _HARDLY:
            doubt = "a typical interval is about as wide as there"
    flags = f"{percent(away.flagged)} of those examples are flagged for a person to look at"
    if not isinstance(after, ClassQuality) and away.flagged_after is not None:
        flags += f", with intervals {number(away.flagged_after / findings.inside.after, 2)} times as wide"
    return f"{good}; {unlike} {doubt}, and {flags if findings.score.line is not None else _NO_FLAGS}."


def _of_flagged(each: Behaviour) -> Behaviour:
    """Behaviour on those that are flagged alone, where there are any."""
    if each.flagged_before is None or each.flagged_after is None:
        return each
    return each._replace(before=each.flagged_before, after=each.flagged_after)


def _made(each: Behaviour) -> str:
    return f"“{each.name}” ones"


def _change(findings: Findings, away: Behaviour) -> str:
    if findings.subject.is_classification:
        return f"its average confidence is {percent(away.after)} ({percent(away.before)} without distance)"
    return f"half of its 95 % intervals are wider than {number(away.after)} ({number(away.before)} without distance)"


def _error(share: float, count: int) -> float:
    """Standard error of a share; a share of 1 is not known exactly either."""
    smoothed = (share * count + 1) / (count + 2)
    return math.sqrt(smoothed * (1 - smoothed) / count)
