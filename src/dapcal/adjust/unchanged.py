"""Unchanged: no adjustment. Distances are measured and the OOD score is given, but predictions do not change."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dapcal.ensembles import base_ensemble, closed_ensemble, outputs_with_spread
from dapcal.storing import Stores
from dapcal.types import Adjusted, Adjustment, Posterior


@dataclass(frozen=True)
class Unchanged(Adjustment):
    """The base posterior at every distance.

    It is the answer where an adjustment is known to gain nothing away from the data. φ has no meaning then.

    Args:
        drawn: see the posterior by its draws, also where it has moments; a joint prediction needs that.
    """

    stores = Stores()

    drawn: bool = False

    @property
    def closed_form(self) -> bool:
        """Unless draws are asked for."""
        return not self.drawn

    @property
    def limited(self) -> bool:
        """From the start."""
        return True

    @property
    def heeds_distance(self) -> bool:
        """Never."""
        return False

    def __call__(self, posterior: Posterior, x: Tensor) -> Adjusted:
        """One pass over the draws."""
        moments = posterior.moments(x) if self.closed_form else None
        likelihood = posterior.likelihood
        if moments is None:
            base = base_ensemble(likelihood, outputs_with_spread(posterior, x))
        else:
            base = closed_ensemble(likelihood, moments)
        return lambda distance: base  # noqa: ARG005
