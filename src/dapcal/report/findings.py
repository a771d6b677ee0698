"""What a report says, as plain numbers: measured here, drawn elsewhere."""

from __future__ import annotations

import math
import platform
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.models.subject import Subject
from dapcal.report.histograms import MOST_SAMPLED, SUSPICIOUS, Histogram, distance_histograms, score_histogram
from dapcal.report.map import Map, plane
from dapcal.report.numbers import number
from dapcal.report.outside import outside
from dapcal.report.predictions import Answers, Predicted, predict
from dapcal.report.quality import ComparedClasses, ComparedNumbers, compare
from dapcal.report.strangest import Strange, strangest
from dapcal.report.unseen import judges
from dapcal.report.weights import Weights, weights_of
from dapcal.search import Curve
from dapcal.types import DapcalWarning

MOST_JUDGED = 5_000  # held-out or new inputs that are looked at
_WIDTH = 2 * 1.959964  # of a 95 % interval, in standard deviations


class Behaviour(NamedTuple):
    """How the model behaves on one set of inputs."""

    name: str
    examples: int
    flagged: float  # share with p <= 0.05
    far: float  # share with d0 > 0
    before: float  # mean confidence, or median width of 95 % intervals as people see them: a few are very wide
    after: float
    flagged_before: float | None  # the same of those that are flagged; None without any
    flagged_after: float | None


@dataclass(frozen=True, eq=False)
class Findings:
    """Everything that the page shows."""

    subject: Subject
    judged: int  # held-out inputs that quality is measured on
    unseen: bool  # whether these had no say in φ
    quality: ComparedClasses | ComparedNumbers
    inside: Behaviour
    outside: tuple[Behaviour, ...]
    is_made_up: bool  # whether what lies outside is made of training inputs
    samples: tuple[str, ...]  # what lies outside, in words
    distances: tuple[Histogram, ...]
    score: Histogram
    strangest: tuple[Strange, ...]
    strangest_of: str
    curve: Curve
    weights: Weights
    map: Map | None
    notes: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]


def find(subject: Subject) -> Findings:
    """Measure everything."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DapcalWarning)  # collapsed weights: once a batch, and the report counts them
        return _find(subject)


def _find(subject: Subject) -> Findings:
    calibrated, held_out = subject.calibrated, subject.held_out
    chosen = judges(calibrated, held_out.x, MOST_JUDGED, subject.seed)
    rows = chosen.rows.to(held_out.x.device)
    x, y = held_out.x[rows], held_out.y[chosen.rows.to(held_out.y.device)]
    seen = predict(calibrated, x, y)
    beyond = outside(subject, MOST_JUDGED if subject.new is not None else MOST_SAMPLED)
    further = [predict(calibrated, each.x) for each in beyond]
    if subject.new is None:
        strange, strange_of = strangest(subject, x, chosen.rows, seen.score, y), "held-out data"
    else:
        strange = strangest(subject, beyond[0].x, beyond[0].rows, further[0].score, None)
        strange_of = subject.new_name
    named = [("held-out", seen), *((each.name, found) for each, found in zip(beyond, further, strict=True))]
    return Findings(
        subject=subject,
        judged=len(x),
        unseen=chosen.unseen,
        quality=compare(seen, y, None if subject.is_classification else subject.unit[1]),
        inside=_behaviour(subject, "held-out", seen),
        outside=tuple(_behaviour(subject, each.name, found) for each, found in zip(beyond, further, strict=True)),
        is_made_up=subject.new is None,
        samples=tuple(each.words for each in beyond),
        distances=distance_histograms(calibrated, subject.train.x, named),
        score=score_histogram(calibrated, named),
        strangest=strange,
        strangest_of=strange_of,
        curve=_as_seen(subject),
        weights=weights_of(calibrated, [seen, *further]),
        map=plane(subject),
        notes=calibrated.notes,
        settings=_settings(subject),
    )


def _behaviour(subject: Subject, name: str, found: Predicted) -> Behaviour:
    flagged = found.p_value <= SUSPICIOUS

    def sureness(answers: Answers, rows: Tensor) -> float:
        if subject.is_classification:
            return float(answers.mean[rows].max(-1).values.mean())
        return _WIDTH * abs(subject.unit[1]) * float(answers.variance[rows].sqrt().median())

    everything, some = torch.ones_like(flagged), bool(flagged.any())
    return Behaviour(
        name=name,
        examples=len(found.score),
        flagged=float(flagged.double().mean()),
        far=float((found.pre_distance > 0).double().mean()),
        before=sureness(found.before, everything),
        after=sureness(found.after, everything),
        flagged_before=sureness(found.before, flagged) if some else None,
        flagged_after=sureness(found.after, flagged) if some else None,
    )


def _as_seen(subject: Subject) -> Curve:
    """The curve of φ with the NLL of targets as people see them."""
    curve, unit = subject.calibrated.curve, 0.0
    if not subject.is_classification:
        unit = subject.held_out.y[0].numel() * math.log(abs(subject.unit[1]))
    return Curve(
        phi=curve.phi.cpu(),
        loss=curve.loss.cpu(),
        nll=curve.nll.cpu() + unit,
        base_loss=curve.base_loss,
        base_nll=curve.base_nll + unit,
        guard=curve.guard + unit,
        error=curve.error.cpu(),
    )


def _settings(subject: Subject) -> tuple[tuple[str, str], ...]:
    from dapcal import __version__

    calibrated = subject.calibrated
    spaces = "; ".join(
        f"{space.name} (no radius)"
        if space.radius is None
        else f"{space.name} (radius {number(space.radius.start, 4)})"
        for space in calibrated.distance.spaces
    )
    return (
        ("φ", number(calibrated.phi, 6)),
        ("factor g(φ)", f"{number(calibrated.factor, 6)}, g = {calibrated.scale!r}"),
        ("adjustment", type(calibrated.adjust).__name__),
        ("posterior", type(calibrated.posterior).__name__),
        ("likelihood", type(calibrated.posterior.likelihood).__name__),
        ("distances between", spaces),
        ("training inputs", f"{len(subject.train.x):,}"),
        ("held-out inputs", f"{len(subject.held_out.x):,}"),
        ("scores that p-values are read from", f"{len(calibrated.evidence.held_out):,}"),
        ("shape of an input", " × ".join(str(side) for side in calibrated.example.shape[1:])),
        ("versions", f"dapcal {__version__}, torch {torch.__version__}, Python {platform.python_version()}"),
    )
