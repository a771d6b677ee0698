"""Transport: the distance-aware posterior of a Gaussian posterior, exactly, without weights.

Σ_d = (Σ⁻¹ − C)⁻¹ and μ_d = Σ_d Σ⁻¹ μ; the base draws' noise is kept, so predictions are smooth in φ.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dapcal.ensembles import base_ensemble, closed_ensemble, outputs_with_spread
from dapcal.likelihoods import Likelihood
from dapcal.moments import OutputMoments
from dapcal.posteriors.network import NetworkPosterior
from dapcal.storing import Stores
from dapcal.types import Adjusted, Adjustment, Ensemble, Posterior


@dataclass(frozen=True)
class Transport(Adjustment):
    """Move a Gaussian posterior to the distance-aware prior.

    Every level of distance needs its own parameters, so inputs are grouped: distances are put on a fixed grid in
    log((σ0 + d)/σ0), and an input's outputs are interpolated between the two levels around it. A new φ costs about two
    passes over the draws.

    Args:
        shift: move the mean too. This is the literal posterior, but the mean grows faster than the spread and
            predictions get more confident; keeping the mean is the useful form.
        step: of the grid; None evaluates every distinct distance exactly.
        drawn: move the draws also where outputs are linear in the parameters (a last layer, a linearised network) and
            the variance has a closed form. This is what a joint prediction needs.
    """

    stores = Stores()

    shift: bool = False
    step: float | None = 0.1
    drawn: bool = False

    @property
    def closed_form(self) -> bool:
        """Unless draws or the mean are moved."""
        return not (self.drawn or self.shift)

    def __call__(self, posterior: Posterior, x: Tensor) -> Adjusted:
        """One pass over the base draws; distances cost further ones."""
        if not isinstance(posterior, NetworkPosterior) or posterior.gaussian is None or posterior.prior is None:
            raise ValueError(
                "Transport needs a Gaussian posterior over a network's parameters (variational, or given by moments) "
                "with a prior scale; use Inflate(), which works on any posterior"
            )
        if self.step is not None and not self.step > 0:
            raise ValueError(f"Expected `step` > 0 or None, got {self.step}")
        likelihood, gaussian, prior = posterior.likelihood, posterior.gaussian, posterior.prior
        moments = posterior.moments(x, moving=True) if self.closed_form else None
        if moments is not None:
            return _closed(likelihood, moments)
        outputs = outputs_with_spread(posterior, x)
        base = base_ensemble(likelihood, outputs)
        lead = prior.lead
        prepared = cache(lambda: posterior.prepared(x))

        def outputs_at(distance: Tensor, rows: Tensor) -> Tensor:
            c = prior.precision_drop(distance[None])[0]
            return prepared()(gaussian.transport(posterior.draws, c, prior, self.shift), rows)

        def at(distance: Tensor) -> Ensemble:
            distance = distance.double().cpu()
            if self.step is None:
                lower, share = distance, torch.zeros_like(distance)
            else:
                level = torch.log1p(distance * lead) / self.step
                lower, share = level.floor(), level - level.floor()
            moved = torch.zeros_like(outputs)
            for offset, weight in ((0, 1 - share), (1, share)):
                levels = torch.where(weight > 0, lower + offset, torch.nan)
                for value in levels[~levels.isnan()].unique():
                    rows = torch.nonzero(levels == value).flatten()
                    d = value if self.step is None else torch.expm1(value * self.step) / lead
                    piece = outputs[:, rows] if d == 0 else outputs_at(d, rows)
                    moved[:, rows] += weight[rows].to(outputs)[:, None] * piece
            return base._replace(outputs=moved, conditional=likelihood.conditional(moved))

        return at


def _closed(likelihood: Likelihood, moments: OutputMoments) -> Adjusted:
    base = closed_ensemble(likelihood, moments)
    outputs = moments.mean.shape[-1]
    return lambda distance: base._replace(spread=likelihood.closed_spread(moments.moved(distance), outputs))
