"""Inflate: the base posterior's spread multiplied by k = (σ0 + d)/σ0, the envelope of the distance-aware posterior.

For outputs locally linear in θ with base covariance V, the distance-aware covariance lies between V and k²V, and
reaches k²V where only the prior speaks, which is where an out-of-distribution input looks. It needs no more forward
passes and no σ0 (where there is none, k = 1 + d and φ absorbs it), so it works on every posterior.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dapcal.ensembles import with_variance
from dapcal.likelihoods import Likelihood, Unconditional
from dapcal.storing import Stores
from dapcal.types import Adjusted, Adjustment, Ensemble, Posterior


@dataclass(frozen=True)
class OfTrainingTargets:
    """The limit that `calibrate` finds in the training targets (`Likelihood.unconditional`).

    Args:
        own_spread: count the variance of the targets alone, and not how far a prediction lies from their mean. Of
            logarithms that distance would be a factor by which no target ever differed.
    """

    stores = Stores()

    own_spread: bool = False


@dataclass(frozen=True)
class Inflate(Adjustment):
    """Inflate the spread of the location outputs by k.

    Closed form (default): variance (k² − 1)·V is added analytically. In regression the prediction is the Gaussian with
    mean f̄ and variance noise + k²V. In classification it is softmax(log p̄ / t) with t = √(1 + π/8 · V (k² − 1)): the
    most likely class stays, and confidence falls monotonically to 1/K.

    Drawn: every draw is pushed away from the draws' mean by k. This is what a joint prediction needs. In
    classification confidence then tends to the draws' votes, not to 1/K.

    Without a limit k grows with distance for ever, and calibration, which sees small distances, says nothing of how
    far it should. What is known of a target without looking at its input is the limit in regression, as 1/K is in
    classification: the variance never grows above E[(y − f̄)²] over the training targets, the variance with which a
    Gaussian at f̄ describes them best. Where targets may leave the range of the training targets, use limit=None.

    Args:
        drawn: push the draws instead of the closed form.
        limit: of the closed form in regression, by default that of the training targets, which `fitted` receives
            (before it there is none); None for no limit.
    """

    stores = Stores()

    drawn: bool = False
    limit: Unconditional | OfTrainingTargets | None = OfTrainingTargets()

    @property
    def closed_form(self) -> bool:
        """Unless draws are pushed."""
        return not self.drawn

    @property
    def limited(self) -> bool:
        """Where there is a limit."""
        return self.limit is not None and not isinstance(self.limit, OfTrainingTargets)

    def fitted(self, likelihood: Likelihood, y: Tensor) -> Inflate:
        """With the limit that training targets y give; drawn, or in classification, there is none."""
        if not isinstance(self.limit, OfTrainingTargets):
            return self
        found = None if self.drawn else likelihood.unconditional(y)
        return replace(self, limit=None if found is None else replace(found, own_spread=self.limit.own_spread))

    def __call__(self, posterior: Posterior, x: Tensor) -> Adjusted:
        """One pass over the draws; every distance is free after that."""
        likelihood = posterior.likelihood
        base, variance = with_variance(posterior, x, self.drawn)
        most = torch.full_like(variance, torch.inf)
        if self.limit is not None and not isinstance(self.limit, OfTrainingTargets):
            most = likelihood.room(base, self.limit)  # (N, K)

        def at(distance: Tensor) -> Ensemble:
            k = 1 + distance.double() if posterior.prior is None else posterior.prior.widening(distance)
            k = k.to(variance.device)
            if self.drawn:
                pushed = likelihood.stretch(base.outputs, k)
                return base._replace(outputs=pushed, conditional=likelihood.conditional(pushed))
            return base._replace(spread=base.spread + torch.minimum(variance * (k**2 - 1)[:, None], most))

        return at
