"""What the guard counts: how much the held-out NLL rises, as rows pay it that had no part in choosing.

    NLL(φ) + the larger of  - one standard error of its rise
                            - what its rise is more, with its standard error, where every row is measured by a radius
                              of others, and one more row lies outside, which pays the most of all that do

Of a few rows hardly any lie outside a radius that they have fixed themselves, and these may happen to be wrong ones, to
which all widening does good. New rows lie outside more often, and farther. What the row more pays counts 1/(n + 1).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dapcal.distances import FittedSpace, Space
from dapcal.distances.radius import fit_radius
from dapcal.distances.spaces import Distance
from dapcal.errors import NothingToCalibrate
from dapcal.likelihoods import Likelihood
from dapcal.types import DapcalWarning, Ensemble

FOLDS = 10  # of the rows that choose; each is measured by the radius of the nine others


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows that choose φ, ready for every factor g(φ).

    Attributes:
        likelihood: of the posterior.
        base: what the posterior says of them without a distance.
        y: their targets.
        adjusted: the posterior adjusted to distances, at these rows.
        d0: their pre-distance, (n,).
        crossed: the same by the radius of others, (n,).
    """

    likelihood: Likelihood
    base: Ensemble
    y: Tensor
    adjusted: Callable[[Tensor], Ensemble]
    d0: Tensor
    crossed: Tensor

    def at(self, factor: float) -> tuple[float, float]:
        """The NLL, and how much more the guard counts."""
        before = self._log_prob
        own = before - self.likelihood.log_prob(self.adjusted(factor * self.d0), self.y)
        ensemble = self.adjusted(factor * self.crossed)
        rises = before - self.likelihood.log_prob(ensemble, self.y)
        outside = self.crossed.to(rises.device) > 0
        if outside.any():
            expected = self.likelihood.expected_rise(self.base, ensemble)
            rises = torch.cat([rises, torch.maximum(rises, expected)[outside].max()[None]])
        rise = own.mean()
        return float(rise - before.mean()), max(_error(own), float(rises.mean() - rise) + _error(rises))

    @cached_property
    def _log_prob(self) -> Tensor:
        return self.likelihood.log_prob(self.base, self.y)


def crossed(spaces: tuple[Space, ...], distance: Distance, raw: Tensor) -> Tensor:
    """d0 (n,) of rows by the radius of others, from raw distances (spaces, n).

    Args:
        spaces: as they were asked for.
        distance: in the fitted ones.
        raw: of rows in any order that tells nothing of them.
    """
    d0 = distance.combine(raw)
    fold = torch.arange(raw.shape[1], device=raw.device) % FOLDS
    for number in range(min(FOLDS, raw.shape[1])):
        own, others = fold == number, fold != number
        measured = [_by_others(*each, own, others) for each in zip(spaces, distance.spaces, raw, strict=True)]
        if measured:
            d0[own] = torch.stack(measured).max(0).values.to(d0)
    return d0


def _by_others(space: Space, fitted: FittedSpace, raw: Tensor, own: Tensor, others: Tensor) -> Tensor:
    if fitted.radius is None or space.radius is None:
        return raw[own]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DapcalWarning)  # the radius of all rows has said it
            return fit_radius(raw[others], space.radius, fitted.name)(raw[own])
    except NothingToCalibrate:  # all others have a twin in training
        return fitted.excess(raw[own])


def _error(rises: Tensor) -> float:
    return float(rises.std()) / math.sqrt(len(rises))
