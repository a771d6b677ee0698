"""What a report says in words beside its figures; every number in them is computed."""

from __future__ import annotations

import math

from dapcal.explain import Answer
from dapcal.models.subject import Subject
from dapcal.report.findings import Findings
from dapcal.report.histograms import Histogram
from dapcal.report.map import Map, MapFrame
from dapcal.report.numbers import number, percent
from dapcal.report.quality import ClassQuality, ComparedClasses
from dapcal.report.strangest import Strange
from dapcal.report.weights import Weights


def judged_on(findings: Findings) -> str:
    """Which held-out data the numbers come from."""
    if findings.unseen:
        return (
            f"Measured on {findings.judged:,} held-out examples that had no say in choosing φ (the other half of the "
            "held-out data chose it)."
        )
    return (
        f"Measured on {findings.judged:,} held-out examples. Half of the held-out data chose φ, and which half is not "
        "known here, so what stands under “after” may flatter a little."
    )


def price(findings: Findings) -> str:
    """What taking distance into account costs on data like the training data."""
    before, after = findings.quality
    change = after.nll - before.nll
    if change == 0:
        return "Taking distance into account leaves the negative log-likelihood here as it was."
    words = f"Taking distance into account {'raises' if change > 0 else 'lowers'} the negative log-likelihood here by"
    allowed = findings.curve.guard - findings.curve.base_nll
    guard = (
        f"; the calibration allowed a rise of {number(allowed, 2)} on its own half" if math.isfinite(allowed) else ""
    )
    return f"{words} {number(abs(change), 2)} nats{guard}."


def judged_briefly(findings: Findings) -> str:
    """The same in a few words."""
    had = "none of which chose φ" if findings.unseen else "some of which chose φ"
    return f"On {findings.judged:,} held-out examples, {had}."


def weights(found: Weights) -> list[str]:
    """What the diagnostics of importance weights mean."""
    if found.is_closed:
        return [
            f"{found.adjustment} sees this posterior through the mean and variance of its outputs, in closed form: "
            "there are no draws to weight, so no weights can go wrong."
        ]
    words = []
    if not found.is_weighted:
        words.append(
            f"All {found.draws} draws of the posterior count alike: {found.adjustment} widens or moves their spread "
            "with distance instead of weighting them. So there are no importance weights that could collapse: the "
            f"effective number of draws is {found.draws} everywhere, the total weight W is 1, and Pareto’s k̂ has "
            "nothing to measure."
        )
    else:
        low, high = (number(total) for total in found.total_weight)
        words += [
            f"Effective draws: at worst {number(found.least_ess)} of {found.draws}.",
            f"Total weight W: {low if low == high else f'between {low} and {high}'}. "
            + (
                "Predictions are proper distributions."
                if found.is_proper
                else "Where it is not 1, probabilities do not sum to one."
            ),
        ]
        if found.largest_k is not None:
            words.append(f"Pareto’s k̂, how heavy the tail of the weights is: at worst {number(found.largest_k)}.")
        words.append(
            f"At {percent(found.collapsed)} of the examples the weights have collapsed (few effective draws, or "
            "k̂ > 0.7): predictions there are not to be trusted."
            if found.collapsed
            else "The weights have collapsed nowhere."
        )
    if found.contracted:
        words.append(
            f"{found.contracted:,} directions of the posterior are wider than the prior, and counted as wide as the "
            "prior: where they are many, the prior’s scale is too small."
        )
    return words


def answer(subject: Subject, found: Answer) -> str:
    """A prediction in a few words."""
    if subject.classes:
        best = max(range(len(found.mean)), key=lambda place: found.mean[place])
        return f"{cut(subject.classes[best])} ({percent(found.mean[best])})"
    center, scale = subject.unit
    intervals = zip(found.mean, found.lower, found.upper, strict=True)
    return ", ".join(f"{number(center + scale * m)} ± {number(abs(scale) * (b - a) / 2, 2)}" for m, a, b in intervals)


def target(subject: Subject, value: tuple[float, ...]) -> str:
    """A true target as people see it."""
    if subject.classes:
        return cut(subject.classes[int(value[0])])
    return ", ".join(number(subject.unit[0] + subject.unit[1] * each) for each in value)


def strange(findings: Findings, found: Strange) -> list[str]:
    """What there is to say of a strange example."""
    subject, explanation = findings.subject, found.explanation
    before, after = answer(subject, explanation.before), answer(subject, explanation.after)
    truth = f" True: {target(subject, found.target)}." if found.target else ""
    reach = explanation.farthest
    radius = "" if reach.radius is None else f"; up to {number(reach.radius)} (the radius) is ordinary"
    return [
        f"Predicted {after}; without distance {before}.{truth}",
        f"{_rarity(findings, found)} Distance {number(reach.raw)} between {reach.space}{radius}.",
    ]


def _rarity(findings: Findings, found: Strange) -> str:
    """How unusual its score is; p-values are read from held-out scores, so that held-out examples have a rank."""
    if findings.subject.new is None:
        return f"Number {found.rank} by score of {findings.judged:,} held-out examples."
    p, compared = found.explanation.p_value, len(findings.subject.calibrated.evidence.held_out)
    if p < 1.5 / (compared + 1):
        return f"p = {number(p, 2)}: it scores higher than all {compared:,} held-out examples it was compared with."
    return f"p = {number(p, 2)}: about {percent(p)} of held-out examples score as high."


def frame(found: MapFrame, is_chosen: bool) -> str:
    """What a frame of the map shows."""
    if found.phi is None:
        return "Without distance: the model as it was"
    if is_chosen:
        return f"φ = {number(found.phi)}, the calibrated one"
    return f"φ = {number(found.phi)}: distance counts {number(found.times, 2)} × as much as calibrated"


def plane(findings: Findings, data: Map) -> str:
    """What the map shows."""
    name = "Confidence" if findings.subject.classes else "Standard deviation that comes from missing data"
    classes = [cut(name, 24) for name in findings.subject.classes]
    by = f", white for {classes[0]} and black for {classes[1]}" if len(classes) == 2 else ""
    return (
        f"{name} over the two inputs, and {len(data.points):,} training examples{by}. Move the slider, or use the "
        "arrow keys, to see other values of φ; the leftmost is the model as it was."
    )


def behaviour(findings: Findings) -> str:
    """What the table of behaviour is of."""
    made_up = (
        " All but the first line are made-up examples, as no further data were given." if findings.is_made_up else ""
    )
    if findings.score.line is None:
        return f"Too few examples were held out for a p-value of 0.05, so that nothing can be flagged.{made_up}"
    return f"Flags are set so that about {percent(0.05)} of data like the held-out data get one.{made_up}"


def radius(findings: Findings, data: Histogram) -> str:
    """What the radius of one space means; the largest distance counts, so that all spaces have a say."""
    if data.line is None:
        return "There is no radius: every distance counts."
    where = "there" if len(findings.distances) == 1 else "inside it in every space"
    return f"Inside the radius nothing counts as far, and predictions {where} stay as they were."


def samples(findings: Findings) -> str:
    """Where the samples of the histograms come from."""
    kinds = [f"{each[0].upper()}{each[1:]}." for each in findings.samples]
    if any(name == "training" for name, _ in findings.distances[0].samples):
        kinds.insert(0, "Training: distances to the nearest other training example.")
    return " ".join(kinds)


def rows_of_numbers(findings: Findings) -> list[tuple[str, str, str, str]]:
    """Measures before and after, and what is good."""
    if isinstance(findings.quality, ComparedClasses):
        return _rows_of_classes(*findings.quality)
    before, after = findings.quality
    return [
        ("error (root mean square)", number(before.rmse), number(after.rmse), "low"),
        ("targets inside 95 % intervals", percent(before.coverage), percent(after.coverage), "95 %"),
        ("mean width of 95 % intervals", number(before.width), number(after.width), "small, if the line above holds"),
        ("CRPS", number(before.crps), number(after.crps), "low"),
        ("negative log-likelihood (nats)", number(before.nll), number(after.nll), "low"),
    ]


def _rows_of_classes(before: ClassQuality, after: ClassQuality) -> list[tuple[str, str, str, str]]:
    chance = f"0; about {number(after.ece_by_chance[0], 2)} by chance with so many examples"
    return [
        ("share right (accuracy)", percent(before.accuracy), percent(after.accuracy), "high"),
        ("average confidence", percent(before.confidence), percent(after.confidence), "equal to the share right"),
        ("expected calibration error", number(before.ece, 2), number(after.ece, 2), chance),
        ("negative log-likelihood (nats)", number(before.nll), number(after.nll), "low"),
        ("Brier score", number(before.brier), number(after.brier), "low"),
    ]


def cut(words: str, most: int = 60) -> str:
    """Long words end in an ellipsis.

    >>> cut("short"), cut("a long name", 6)
    ('short', 'a lon…')
    """
    return words if len(words) <= most else f"{words[: most - 1]}…"
