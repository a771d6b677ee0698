"""One case under one seed, measured before and after: predictions in distribution, and detection of outliers."""

from __future__ import annotations

import math
import time
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dapcal.calibrate import Calibrated
from dapcal.data import Labelled
from dapcal.ensembles import base_ensemble, seen
from dapcal.experiments.no_harm.cases import Data
from dapcal.experiments.no_harm.fitting import Task, before_and_after
from dapcal.experiments.no_harm.problems import Outside, Problem, problem
from dapcal.likelihoods import ClassLikelihood, Interval
from dapcal.metrics import accuracy, coverage, detection, expected_calibration_error, rmse
from dapcal.ranks import auroc
from dapcal.records import DapcalWarning
from dapcal.types import Posterior

LEVEL = 0.95
RESAMPLES = 200


class Said(NamedTuple):
    """What is said of some inputs."""

    log_prob: Tensor | None  # (N,); None without targets
    mean: Tensor  # probabilities or expected targets, (N, K)
    interval: Interval | None  # of targets that are numbers
    score: Tensor  # (N,), higher = further out


def measure(data: Data, posterior: str, seed: int) -> dict[str, Any]:
    """A record: numbers before and after, what was chosen on the way, and seconds of the processor."""
    started = time.process_time()
    given = problem(data, seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DapcalWarning)
        had, calibrated = before_and_after(posterior, Task(given, data, seed))
        ended = time.process_time()
        numbers = compared(had, calibrated, given, seed)
    return {
        "seed": seed,
        **({"gap": given.about} if given.about else {}),
        "rows": [len(part.x) for part in (given.train, given.held_out, given.test)],
        **numbers,
        **chosen(calibrated),
        "warnings": sorted({str(w.message) for w in caught if issubclass(w.category, DapcalWarning)}),
        "seconds": {
            "fitting and calibrating": round(ended - started, 2),
            "measuring": round(time.process_time() - ended, 2),
        },
    }


def compared(had: Posterior, calibrated: Calibrated, given: Problem, seed: int) -> dict[str, Any]:
    """Numbers before and after, and the errors that differences have over test rows."""
    sides = {"before": said_before(had, given.test), "after": said_after(calibrated, given.test)}
    found: dict[str, Any] = {
        side: judged(said, given.test.y, isinstance(given.likelihood, ClassLikelihood)) for side, said in sides.items()
    }
    if had.network is not None:  # what the posterior was made around, with no draws: the user had that, too
        with torch.no_grad():
            alone = base_ensemble(had.likelihood, had.network(given.test.x)[None])
        found["network"] = {"nll": float(-had.likelihood.log_prob(alone, given.test.y).mean())}
    found["row_errors"] = {"nll": _paired_error(sides["before"], sides["after"])}
    found["outliers"] = {}
    for name, outside in given.outliers.items():
        there = {"before": said_before(had, outside), "after": said_after(calibrated, outside)}
        here: dict[str, Any] = {}
        for side, said in there.items():
            scores = detection(sides[side].score, said.score)
            here[side] = {"auroc": scores.auroc, "fpr95": scores.fpr95}
            if said.log_prob is not None:
                here[side]["nll"] = _nll(said)
        scores_of = [(sides[side].score, there[side].score) for side in there]
        here["row_errors"] = {"auroc": bootstrap_error(scores_of, seed)}
        found["outliers"][name] = here
    return found


def chosen(calibrated: Calibrated) -> dict[str, Any]:
    """What calibration has decided, for the page to explain a case by."""
    return {
        "phi": calibrated.phi,
        "adjust": type(calibrated.adjust).__name__,
        "likelihood": repr(calibrated.posterior.likelihood),
        "spaces": [space.name for space in calibrated.distance.spaces],
        "notes": list(calibrated.notes),
    }


def said_before(posterior: Posterior, data: Labelled | Outside) -> Said:
    """By what the user had; its doubt is the score, the same everywhere for one network with one noise level."""
    likelihood, base = posterior.likelihood, seen(posterior, data.x)
    classes = isinstance(likelihood, ClassLikelihood)
    return Said(
        None if data.y is None else likelihood.log_prob(base, data.y),
        likelihood.mean(base),
        None if classes else likelihood.interval(base, LEVEL),
        likelihood.doubt(base),
    )


def said_after(calibrated: Calibrated, data: Labelled | Outside) -> Said:
    """By the calibrated posterior, with its OOD score."""
    prediction = calibrated.predict(data.x)
    classes = isinstance(prediction.likelihood, ClassLikelihood)
    return Said(
        None if data.y is None else prediction.log_prob(data.y),
        prediction.mean,
        None if classes else prediction.interval(LEVEL),
        prediction.ood_score,
    )


def judged(said: Said, y: Tensor, classes: bool) -> dict[str, float]:
    """Accuracy, NLL and calibration error of classes; RMSE, NLL and coverage of numbers."""
    if classes:
        own = {"accuracy": accuracy(said.mean, y), "ece": expected_calibration_error(said.mean, y)}
    else:
        assert said.interval is not None
        ends, target = said.interval, y.double()
        own = {
            "rmse": rmse(said.mean.double(), target),
            "coverage": coverage(ends.lower.double(), ends.upper.double(), target),
        }
    return {"nll": _nll(said), **own}


def bootstrap_error(scores: list[tuple[Tensor, Tensor]], seed: int, resamples: int = RESAMPLES) -> float:
    """Standard error of the difference of two AUROCs on the same rows, inside and outside drawn anew together.

    Args:
        scores: of inside (N,) and outside (M,), before and after.
        seed: of the draws.
        resamples: how many.
    """
    generator = torch.Generator().manual_seed(seed)
    (inside, outside), _ = scores
    differences = []
    for _ in range(resamples):
        here, there = (torch.randint(len(rows), (len(rows),), generator=generator) for rows in (inside, outside))
        first, second = (auroc(far[there].double(), near[here].double()) for near, far in scores)
        differences.append(second - first)
    return float(torch.tensor(differences, dtype=torch.float64).std())


def _nll(said: Said) -> float:
    assert said.log_prob is not None
    return float(-said.log_prob.double().mean())


def _paired_error(one: Said, other: Said) -> float:
    """Standard error of a mean difference over rows (what a bootstrap over them tends to)."""
    assert one.log_prob is not None
    assert other.log_prob is not None
    difference = one.log_prob.double() - other.log_prob.double()
    return float(difference.std() / math.sqrt(len(difference)))
