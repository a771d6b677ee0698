"""What does it do away from its data? Flags, distances, and how sure it is there, beside held-out data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.calibrate import Calibrated
from dapcal.distances import FittedSpace, Hausdorff, NearestNeighbor
from dapcal.distances.projectors import project
from dapcal.likelihoods import Likelihood
from dapcal.models.columns import Unit
from dapcal.models.subject import Subject
from dapcal.records import ALPHA, LEVEL
from dapcal.report.examples import MOST_SAMPLED, Examples, sample
from dapcal.report.kit.histograms import Histogram, drawn, legend_of
from dapcal.report.kit.markup import Captioned, figures, paragraph, table
from dapcal.report.kit.numbers import number, percent
from dapcal.report.predictions import Answers, Predicted

_HARDLY = 0.03  # a fall of the confidence that is not worth the name


class Behaviour(NamedTuple):
    """How the model behaves on one set of inputs."""

    name: str
    examples: int
    flagged: float  # share with p <= 0.05
    doubted: float | None  # share of those that is put down to the model's doubt, not to a distance; None without any
    far: float  # share with d0 > 0
    before: float  # mean confidence, or median width of 95 % intervals as people see them: a few are very wide
    after: float
    flagged_before: float | None  # the same of those that are flagged; None without any
    flagged_after: float | None

    @property
    def of_flagged(self) -> Behaviour:
        """Behaviour on those that are flagged alone, where there are any."""
        if self.flagged_before is None or self.flagged_after is None:
            return self
        return self._replace(before=self.flagged_before, after=self.flagged_after)


class AwayFromData(NamedTuple):
    """Behaviour, and the samples behind it."""

    held_out: Behaviour
    others: tuple[Behaviour, ...]
    spaces: tuple[Histogram, ...]  # raw distances, and the radius
    score: Histogram  # OOD scores, and the one at p = 0.05

    @property
    def has_flags(self) -> bool:
        """Whether enough examples were held out for a p-value of 0.05."""
        return self.score.line is not None


def measure(examples: Examples) -> AwayFromData:
    """From the predictions at all examples."""
    subject = examples.subject
    held_out, *others = (_behaviour(subject, name, found) for name, found in examples.named)
    scores = [(name, found.score) for name, found in examples.named]
    return AwayFromData(
        held_out=held_out,
        others=tuple(others),
        spaces=_distances(subject.calibrated, subject.train.x, examples.named),
        score=Histogram("OOD score", _samples(scores), _score_line(subject.calibrated)),
    )


def section(examples: Examples, found: AwayFromData) -> str:
    """The table, and the histograms."""
    sure = confidence_or_width(examples.subject)
    rows = [
        (
            each.name,
            f"{each.examples:,}",
            percent(each.flagged),
            "" if each.doubted is None else percent(each.doubted),
            percent(each.far),
            sure.show(each.before),
            sure.show(each.after),
        )
        for each in (found.held_out, *found.others)
    ]
    doubt = "of these ambiguous" if examples.subject.is_classification else "of these uncertain"
    heads = ("", "examples", "flagged (p ≤ 0.05)", doubt, "outside the radius", f"{sure.name}, before", "after")
    charts = [
        Captioned(
            drawn(data, f"distance between {data.name}", "radius"), f"Distance between {data.name}", radius(found, data)
        )
        for data in found.spaces
    ]
    note = (
        "Right of the line an example is flagged. The score adds up the distances and the model’s own doubt, each with "
        f"its weight.{_beside(examples)}"
    )
    if not found.has_flags:
        note = "Too few held-out examples for a p-value of 0.05, so there is no line."
    charts.append(Captioned(drawn(found.score, "OOD score", "p = 0.05"), "Score behind p", note))
    return (
        paragraph(flags(examples, found))
        + table("Held-out examples and others", heads, rows)
        + legend_of(*found.spaces[:1], found.score)
        + figures(charts)
        + paragraph(f"{_origins(examples, found)} At most {MOST_SAMPLED:,} of each are drawn.", "small")
    )


def _has_columns(examples: Examples) -> bool:
    """Whether checks of single columns stand beside the sum of the other evidence."""
    return examples.subject.calibrated.evidence.beside > 0


def _beside(examples: Examples) -> str:
    return " One unusual column, or a very large distance, is enough beside that sum." if _has_columns(examples) else ""


def flags(examples: Examples, found: AwayFromData) -> str:
    """What the table is of."""
    doubt = (
        "the model’s doubt (ambiguous)"
        if examples.subject.is_classification
        else ("disagreement of the draws (uncertain)")
    )
    pieces = [doubt, "a distance (far)", *(["the values of single columns"] if _has_columns(examples) else [])]
    reason = f" A flag is put down to the most unusual piece of evidence: {', '.join(pieces[:-1])} or {pieces[-1]}."
    made_up = (
        " All but the first line are made-up examples, as no further data were given." if examples.is_made_up else ""
    )
    if not found.has_flags:
        return f"Too few examples were held out for a p-value of 0.05, so that nothing can be flagged.{made_up}"
    return f"Flags are set so that about {percent(0.05)} of data like the held-out data get one.{reason}{made_up}"


def radius(found: AwayFromData, data: Histogram) -> str:
    """What the radius of one space means; the largest distance counts, so that all spaces have a say."""
    if data.line is None:
        return "There is no radius: every distance counts."
    where = "there" if len(found.spaces) == 1 else "inside it in every space"
    return f"Inside the radius nothing counts as far, and predictions {where} stay as they were."


@dataclass(frozen=True)
class Confidence:
    """How sure a classifier is over many inputs, in numbers and words."""

    likelihood: Likelihood
    name = "average confidence"
    show = staticmethod(percent)

    def of(self, answers: Answers, rows: Tensor) -> float:
        """On those inputs that `rows` picks."""
        return float(self.likelihood.confidence(answers.mean[rows]).mean())

    def change(self, away: Behaviour) -> str:
        """What distance changed."""
        return f"its average confidence is {percent(away.after)} ({percent(away.before)} without distance)"

    def in_short(self, held_out: Behaviour, away: Behaviour) -> tuple[str, str]:  # noqa: ARG002
        """The same in short; and what to add of those that are flagged."""
        if away.before - away.after > _HARDLY:
            return f"its confidence falls from {percent(away.before)} to {percent(away.after)} once distance counts", ""
        return f"its confidence hardly changes ({percent(away.before)} to {percent(away.after)})", ""


@dataclass(frozen=True)
class IntervalWidth:
    """How wide the intervals of a regression are over many inputs, in numbers and words."""

    likelihood: Likelihood
    unit: Unit  # of the target as people see it
    name = "median width of 95 % intervals"
    show = staticmethod(number)

    def of(self, answers: Answers, rows: Tensor) -> float:
        """On those inputs that `rows` picks."""
        lower, upper = self.likelihood.interval_of(answers.mean[rows], answers.variance[rows], LEVEL)
        return float(torch.from_numpy(self.unit.amounts(upper) - self.unit.amounts(lower)).median())

    def change(self, away: Behaviour) -> str:
        """What distance changed."""
        widths = f"{number(away.after)} ({number(away.before)} without distance)"
        return f"half of its 95 % intervals are wider than {widths}"

    def in_short(self, held_out: Behaviour, away: Behaviour) -> tuple[str, str]:
        """The same beside held-out data; and what to add of those that are flagged."""
        ratio, flagged = away.after / held_out.after, ""
        if away.flagged_after is not None:
            flagged = f", with intervals {_as_wide(away.flagged_after / held_out.after)}"
        return f"a typical interval is {_as_wide(ratio)} as there", flagged


def _as_wide(ratio: float) -> str:
    told = number(ratio, 2)
    return "about as wide" if told == "1" else f"{told} times as wide"


def confidence_or_width(subject: Subject) -> Confidence | IntervalWidth:
    """What tells how sure the model is: of classes the one, of numbers the other."""
    return (
        Confidence(subject.likelihood) if subject.is_classification else IntervalWidth(subject.likelihood, subject.unit)
    )


def _behaviour(subject: Subject, name: str, found: Predicted) -> Behaviour:
    sure, flagged = confidence_or_width(subject), found.p_value <= ALPHA
    everything, some = torch.ones_like(flagged), bool(flagged.any())
    return Behaviour(
        name=name,
        examples=len(found.score),
        flagged=float(flagged.double().mean()),
        doubted=float(found.is_doubt[flagged].double().mean()) if some else None,
        far=float((found.pre_distance > 0).double().mean()),
        before=sure.of(found.before, everything),
        after=sure.of(found.after, everything),
        flagged_before=sure.of(found.before, flagged) if some else None,
        flagged_after=sure.of(found.after, flagged) if some else None,
    )


def _distances(calibrated: Calibrated, train: Tensor, named: list[tuple[str, Predicted]]) -> tuple[Histogram, ...]:
    """Raw distances in every space, and the radius; training inputs where a metric has neighbours."""
    found = []
    for place, space in enumerate(calibrated.distance.spaces):
        own = _leave_one_out(space, train)
        samples = [] if own is None else [("training", own)]
        samples += [(name, predicted.raw[place]) for name, predicted in named]
        found.append(Histogram(space.name, _samples(samples), None if space.radius is None else space.radius.start))
    return tuple(found)


def _leave_one_out(space: FittedSpace, train: Tensor) -> Tensor | None:
    """Raw distances of a sample of the training inputs to the others; None where the metric has no neighbours."""
    if not isinstance(space.metric, NearestNeighbor | Hausdorff):
        return None
    k = space.metric.k if isinstance(space.metric, NearestNeighbor) else 1
    if k + 1 > len(train):
        return None
    rows = sample(torch.arange(len(train)), MOST_SAMPLED).to(train.device)
    return space.metric.index.query(project(space.projector, train[rows]), k + 1)[0][:, -1]


def _score_line(calibrated: Calibrated) -> float | None:
    """The score above which p <= 0.05; None where too few held-out inputs can give so small a p-value."""
    held_out = calibrated.evidence.held_out
    allowed = int(ALPHA * (len(held_out) + 1) + 1e-9) - 1  # held-out scores that may be as high
    return None if allowed < 0 else float(held_out[len(held_out) - 1 - allowed])


def _samples(named: list[tuple[str, Tensor]]) -> tuple[tuple[str, tuple[float, ...]], ...]:
    return tuple((name, tuple(sample(values.double().cpu(), MOST_SAMPLED).tolist())) for name, values in named)


def _origins(examples: Examples, found: AwayFromData) -> str:
    """Where the samples of the histograms come from."""
    kinds = [f"{other.words[0].upper()}{other.words[1:]}." for other in examples.others]
    if any(name == "training" for space in found.spaces[:1] for name, _ in space.samples):
        kinds.insert(0, "Training: distances to the nearest other training example.")
    return " ".join(kinds)
