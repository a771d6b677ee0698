"""How far importance weights can be trusted, over all inputs of a report."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dapcal.adjust.base import is_closed
from dapcal.calibrate import Calibrated
from dapcal.diagnostics import importance_of
from dapcal.report.predictions import Predicted


class Weights(NamedTuple):
    """How far weighted draws can be trusted, over held-out inputs and those outside."""

    adjustment: str
    draws: int
    is_weighted: bool  # whether the draws differ in weight at all
    is_closed: bool  # whether the posterior is seen through closed-form moments instead of draws
    least_ess: float
    total_weight: tuple[float, float]  # smallest and largest W
    largest_k: float | None  # Pareto's k̂, where it can be computed
    collapsed: float  # share of the inputs with few effective draws or k̂ > 0.7
    contracted: int


def weights_of(calibrated: Calibrated, found: list[Predicted]) -> Weights:
    """From predictions of one or more sets of inputs."""
    ess, total, k = (torch.cat([getattr(f, name) for f in found]) for name in ("ess", "total_weight", "pareto_k"))
    prediction = calibrated(calibrated.example)
    draws = len(importance_of(prediction.ensemble))
    known = k[~k.isnan()]
    return Weights(
        adjustment=type(calibrated.adjust).__name__,
        draws=draws,
        is_weighted=bool((ess < draws * (1 - 1e-6)).any()),
        is_closed=is_closed(calibrated.adjust, calibrated.posterior),
        least_ess=float(ess.min()),
        total_weight=(float(total.min()), float(total.max())),
        largest_k=float(known.max()) if len(known) else None,
        collapsed=float(((ess < min(draws / 2, max(2.0, draws / 10))) | (k > 0.7)).double().mean()),
        contracted=prediction.contracted,
    )
