"""Can the computation be trusted? Importance weights, over all inputs of a report."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dapcal.diagnostics import collapsed, importance_of
from dapcal.report.examples import Examples
from dapcal.report.kit.markup import items
from dapcal.report.kit.numbers import number, percent


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


def measure(examples: Examples) -> Weights:
    """From the predictions at all examples."""
    calibrated = examples.subject.calibrated
    names = ("ess", "total_weight", "sums_to", "pareto_k")
    ess, total, sums_to, k = (torch.cat([getattr(each, name) for _, each in examples.named]) for name in names)
    prediction = calibrated(calibrated.example)
    draws = len(importance_of(prediction.ensemble))
    known = k[~k.isnan()]
    return Weights(
        adjustment=type(calibrated.adjust).__name__,
        draws=draws,
        is_weighted=prediction.ensemble.importance is not None or bool((ess < draws * (1 - 1e-6)).any()),
        is_closed=calibrated.adjust.closed_form and calibrated.posterior.moments(calibrated.example) is not None,
        least_ess=float(ess.min()),
        total_weight=(float(total.min()), float(total.max())),
        is_proper=bool(((sums_to - 1).abs() < 1e-6).all()),
        largest_k=float(known.max()) if len(known) else None,
        collapsed=float(collapsed(ess, k, draws).double().mean()),
        contracted=prediction.contracted,
    )


def section(examples: Examples, found: Weights) -> str:  # noqa: ARG001
    """A list of sentences."""
    return items(told(found))


def told(found: Weights) -> list[str]:
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
