"""The first words of a report: what the model is, how good it is, and what it does away from its data."""

from __future__ import annotations

from dapcal.models.subject import Subject
from dapcal.report.examples import Examples
from dapcal.report.kit.markup import cut
from dapcal.report.kit.numbers import percent
from dapcal.report.questions.accuracy import Accuracy
from dapcal.report.questions.away_from_data import AwayFromData, confidence_or_width
from dapcal.report.questions.how_sure import Sureness

_NO_FLAGS = "none can be flagged, as too few examples were held out for a p-value of 0.05"


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
        noun = "labels" if subject.has_labels else "classes"
        classes = f" ({len(subject.classes)} {noun}: {named}{', …' if len(subject.classes) > 6 else ''})"
    examples = f"{len(subject.train.x):,} examples"
    return f"This model predicts {cut(subject.target)}{classes} from {inputs}, learnt from {examples}."


def how_good(examples: Examples, good: Accuracy, sure: Sureness) -> str:
    """Quality on held-out data."""
    count = examples.count
    return f"On {count:,} held-out examples {good.after.told(count)}{sure.after.told(count)}."


def how_far(examples: Examples, away: AwayFromData) -> str:
    """Behaviour away from the data."""
    change = confidence_or_width(examples.subject).change
    if examples.is_made_up:
        sets = "; ".join(f"on “{each.name}” ones {change(each)}" for each in away.others)
        return f"No further data were given, so its behaviour away from the data is shown on made-up inputs: {sets}."
    new = away.others[0]
    if not away.has_flags:
        return f"On {new.examples:,} examples of {cut(new.name)} {change(new)}; {_NO_FLAGS}."
    whom = "on all of them" if new.flagged_after is None else "on these"
    return (
        f"Of {new.examples:,} examples of {cut(new.name)}, {percent(new.flagged)} are flagged as unlike the training "
        f"data (p ≤ 0.05, as about {percent(0.05)} of ordinary data are); {whom} {change(new.of_flagged)}."
    )


def in_short(examples: Examples, sure: Sureness, away: AwayFromData) -> str:
    """One sentence for someone who reads no other."""
    other = away.others[0]
    unlike = f"on made-up {other.name}" if examples.is_made_up else f"on {cut(other.name)}"
    doubt, of_flagged = confidence_or_width(examples.subject).in_short(away.held_out, other)
    flags = f"{percent(other.flagged)} of those examples are flagged for a person to look at{of_flagged}"
    return f"{sure.after.in_short()}; {unlike} {doubt}, and {flags if away.has_flags else _NO_FLAGS}."
