"""How far importance weights can be trusted, over all inputs of a report."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dapcal.adjust import MomentMatched, Reweight
from dapcal.adjust.base import is_closed
from dapcal.calibrate import Calibrated
from dapcal.diagnostics import collapsed, importance_of
from dapcal.report.predictions import Predicted


class Weights(NamedTuple):
    """How far weighted draws can be trusted, over held-out inputs and those outside."""

    adjustment: str
    draws: int
    is_weighted: bool  # whether the adjustment weights draws
    is_closed: bool  # whether the posterior is seen through closed-form moments instead of draws
    least_ess: float
    total_weight: tuple[float, float]  # smallest and largest W
    is_proper: bool  # whether predictions sum to one everywhere, be it after normalisation
    largest_k: float | None  # Pareto's k̂, where it can be computed
    collapsed: float  # share of the inputs with few effective draws or k̂ > 0.7
    contracted: int


def weights_of(calibrated: Calibrated, found: list[Predicted]) -> Weights:
    """From predictions of one or more sets of inputs."""
    names = ("ess", "total_weight", "sums_to", "pareto_k")
    ess, total, sums_to, k = (torch.cat([getattr(each, name) for each in found]) for name in names)
    prediction = calibrated(calibrated.example)
    draws = len(importance_of(prediction.ensemble))
    known = k[~k.isnan()]
    return Weights(
        adjustment=type(calibrated.adjust).__name__,
        draws=draws,
        is_weighted=isinstance(calibrated.adjust, Reweight | MomentMatched) or bool((ess < draws * (1 - 1e-6)).any()),
        is_closed=is_closed(calibrated.adjust, calibrated.posterior),
        least_ess=float(ess.min()),
        total_weight=(float(total.min()), float(total.max())),
        is_proper=bool(((sums_to - 1).abs() < 1e-6).all()),
        largest_k=float(known.max()) if len(known) else None,
        collapsed=float(collapsed(ess, k, draws).double().mean()),
        contracted=prediction.contracted,
    )
