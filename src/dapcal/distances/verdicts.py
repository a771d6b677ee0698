"""Whether a distance is evidence: one space, judged by the model's own errors and by synthetic outliers.

A space is out if any kind of synthetic outlier comes out nearer than held-out inputs, whatever it says of the model's
errors: in pixel space smooth images are near everything, and SVHN lies nearer to CIFAR-10 than CIFAR-10's own test
images. Otherwise it is in if some kind comes out clearly farther, or if it predicts the model's own errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.ranks import auroc, auroc_error, least_correlation, rank_correlation

THRESHOLD = 0.6  # AUROC from which a space counts as informative
NEARER = 0.05  # below 0.5: by how much, at least, outliers that are nearer put a space out
DEVIATIONS = 1.96  # the lower end of a 95 % interval


class Verdict(NamedTuple):
    """Whether a space counts, and why, in words."""

    counts: bool
    words: str


class Predicted(NamedTuple):
    """How well a distance predicts errors, 0.5 by chance, and the lower end of the 95 % interval."""

    value: float
    lower: float


class Farther(NamedTuple):
    """AUROC with which outliers are farther than held-out inputs, and its standard error."""

    value: float
    error: float

    @property
    def is_nearer(self) -> bool:
        """Whether they are nearer, by more than two standard errors."""
        return self.value < 0.5 - max(NEARER, 2 * self.error)


def verdict(own: Predicted, outliers: Mapping[str, Farther]) -> Verdict:
    """The rule, on what was measured."""
    nearer = [kind for kind, found in outliers.items() if found.is_nearer]
    farther = [kind for kind, found in outliers.items() if found.value >= THRESHOLD]
    predicts = own.value >= THRESHOLD and own.lower > 0.5
    if nearer:
        counts, why = False, f"{listed(nearer)} outliers are nearer than held-out inputs"
    elif farther:
        counts, why = True, f"{listed(farther)} outliers are farther than held-out inputs"
    elif predicts:
        counts, why = True, "it predicts the model's own errors"
    else:
        counts, why = False, "it tells neither outliers nor the model's own errors"
    measured = ", ".join(f"{kind} {found.value:.2f}" for kind, found in outliers.items())
    return Verdict(
        counts,
        f"AUROC {own.value:.2f} for the model's own errors (lower 95 % bound {own.lower:.2f}); for synthetic outliers "
        f"{measured}; {'in' if counts else 'out'}: {why}",
    )


def errors_predicted(raw: Tensor, error: Tensor) -> Predicted:
    """AUROC of a distance (N,) for errors (N,) that are there or not; of numbers (1 + rank correlation)/2."""
    error = error.to(raw.device)
    if error.dtype != torch.bool:
        rho = rank_correlation(raw, error)
        return Predicted((1 + rho) / 2, (1 + least_correlation(rho, len(raw), DEVIATIONS)) / 2)
    if not error.any() or error.all():
        return Predicted(0.5, 0.0)
    wrong, right = raw[error], raw[~error]
    value = auroc(wrong, right)
    return Predicted(value, max(0.0, value - DEVIATIONS * auroc_error(wrong, right)))


def farther(outliers: Tensor, inside: Tensor) -> Farther:
    """Distances of outliers against those of held-out inputs."""
    return Farther(auroc(outliers, inside), auroc_error(outliers, inside))


def listed(words: list[str]) -> str:
    """As one says it: "noise", "noise and mixed", "noise, mixed and blurred"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)
