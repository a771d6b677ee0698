"""What was there before and what is there now, on the half of the held-out data that chose nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dapcal import metrics
from dapcal.amounts import amount
from dapcal.calibration.reference import Reference, alone, outputs_alone
from dapcal.data import Labelled
from dapcal.ensembles import base_ensemble, read_by
from dapcal.likelihoods import Likelihood
from dapcal.records import ALPHA, LEVEL
from dapcal.storing import Stores
from dapcal.types import Ensemble, Posterior


@dataclass(frozen=True)
class Quality:
    """How good predictions are.

    Attributes:
        nll: mean negative log-likelihood.
        accuracy: of classes, or over all labels; None in regression.
        calibration_error: of classes, or over all labels: expected, 15 bins.
        rmse: root mean square error in regression; None for classes.
        coverage: of central 95 % intervals.
        exact: share of inputs with all labels right, where an input has several.
    """

    stores = Stores()

    nll: float
    accuracy: float | None = None
    calibration_error: float | None = None
    rmse: float | None = None
    coverage: float | None = None
    exact: float | None = None


@dataclass(frozen=True)
class Summary:
    """Quality before and after calibration at held-out rows that chose nothing; print it.

    Attributes:
        rows: of the half that judges.
        network: the network as it was, where the posterior lies around one.
        posterior: the posterior as it was.
        reference: the better of the two on the half that chooses, with its temperature or noise level.
        reference_name: "network" or "posterior".
        calibrated: what `calibrate` returned.
        rise: of the negative log-likelihood from the reference to the calibrated posterior.
        rise_error: its standard error over rows.
        flagged: share of rows with a p-value up to 0.05, each judged by the others (leave-one-out).
        refitted: whether members were trained again on all rows after these numbers were taken.
    """

    stores = Stores()

    rows: int
    network: Quality | None
    posterior: Quality
    reference: Quality
    reference_name: str
    calibrated: Quality
    rise: float
    rise_error: float
    flagged: float
    refitted: bool = False

    def __str__(self) -> str:
        named = [("network, as it was", self.network), ("posterior, as it was", self.posterior)]
        named += [(f"{self.reference_name}, scaled in the domain", self.reference), ("calibrated", self.calibrated)]
        lines = [f"on {self.rows} held-out rows that chose nothing:"]
        lines += [f"  {name:<32}{_words(quality)}" for name, quality in named if quality is not None]
        change = "rises" if self.rise > 0 else "falls"
        lines.append(
            f"  NLL {change} by {abs(self.rise):.4f} ± {self.rise_error:.4f} from the best of what was there before "
            f"(the {self.reference_name}, by the other half)"
        )
        lines.append(f"  flagged at {ALPHA:g}: {100 * self.flagged:.1f} % of these rows, each judged by the others")
        if self.refitted:
            lines.append("  members were trained again on all rows afterwards; these numbers are of those before")
        return "\n".join(lines)


class Judged(NamedTuple):
    """Predictions at the half that judges."""

    likelihood: Likelihood
    ensemble: Ensemble


def before_and_after(
    given: Posterior, reference: Reference, judges: Labelled, drawn: bool, calibrated: Judged, scores: Tensor
) -> Summary:
    """Quality before and after at the rows that judge."""
    see = read_by(given, judges.x, drawn)
    before = Judged(given.likelihood, see(given.likelihood))
    scaled, network = calibrated, None
    if reference.network is not None and (module := alone(given)) is not None:
        outputs = outputs_alone(module, judges.x)[None]
        network = Judged(given.likelihood, base_ensemble(given.likelihood, outputs))
        scaled = Judged(reference.network, base_ensemble(reference.network, outputs))
    if reference.name == "posterior":
        own = reference.posterior.likelihood
        scaled = Judged(own, see(own))
    return summarise(judges.y, network, before, scaled, reference.name, calibrated, scores)


def summarise(
    y: Tensor,
    network: Judged | None,
    posterior: Judged,
    reference: Judged,
    reference_name: str,
    calibrated: Judged,
    scores: Tensor,
) -> Summary:
    """Measure all of them at the same rows.

    Args:
        y: targets of the rows.
        network: the network alone, as it was given.
        posterior: as it was given.
        reference: the better of both by the other half, scaled.
        reference_name: which it was.
        calibrated: the adjusted posterior.
        scores: OOD scores of the rows, which p-values are read from.
    """
    rise = _log_prob(reference, y) - _log_prob(calibrated, y)
    return Summary(
        rows=len(y),
        network=None if network is None else quality(network, y),
        posterior=quality(posterior, y),
        reference=quality(reference, y),
        reference_name=reference_name,
        calibrated=quality(calibrated, y),
        rise=float(rise.mean()),
        rise_error=float(rise.std() / math.sqrt(len(rise))) if len(rise) > 1 else math.inf,
        flagged=float((leave_one_out(scores) <= ALPHA).double().mean()),
    )


def quality(judged: Judged, y: Tensor) -> Quality:
    """Of predictions at labelled rows."""
    likelihood, ensemble = judged
    nll = float(-_log_prob(judged, y).mean())
    mean = likelihood.mean(ensemble)
    if (decided := likelihood.decisions(mean, y.to(mean.device))) is not None:
        probs, truth = decided.probs.cpu(), decided.y.cpu()
        right = (probs.argmax(-1) == truth).reshape(len(y), -1) if likelihood.task == "multi-label" else None
        return Quality(
            nll,
            accuracy=metrics.accuracy(probs, truth),
            calibration_error=metrics.expected_calibration_error(probs, truth),
            exact=None if right is None else float(right.all(1).double().mean()),
        )
    try:
        ends = likelihood.interval(ensemble, LEVEL)
    except TypeError:  # a likelihood of your own without intervals
        return Quality(nll, rmse=metrics.rmse(mean, y.to(mean)))
    target = y.to(mean)
    return Quality(nll, rmse=metrics.rmse(mean, target), coverage=metrics.coverage(ends.lower, ends.upper, target))


def leave_one_out(scores: Tensor) -> Tensor:
    """p-values of rows among each other, (1 + #{others >= score})/n.

    >>> leave_one_out(torch.tensor([3.0, 1.0, 2.0]))
    tensor([0.3333, 1.0000, 0.6667], dtype=torch.float64)
    """
    ascending = scores.sort().values
    return (len(scores) - torch.searchsorted(ascending, scores, right=False)).double() / len(scores)


def _log_prob(judged: Judged, y: Tensor) -> Tensor:
    return judged.likelihood.log_prob(judged.ensemble, y.to(judged.ensemble.outputs.device))


def _words(quality: Quality) -> str:
    parts = [f"NLL {quality.nll:.4f}"]
    if quality.accuracy is not None:
        parts.append(f"accuracy {100 * quality.accuracy:.1f} %" + ("" if quality.exact is None else " of labels"))
    if quality.exact is not None:
        parts.append(f"all right {100 * quality.exact:.1f} %")
    if quality.calibration_error is not None:
        parts.append(f"calibration error {quality.calibration_error:.3f}")
    if quality.rmse is not None:
        parts.append(f"RMSE {amount(quality.rmse)}")
    if quality.coverage is not None:
        parts.append(f"95 % intervals hold {100 * quality.coverage:.1f} %")
    return ", ".join(parts)
