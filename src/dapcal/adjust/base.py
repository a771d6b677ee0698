"""What all adjustments check."""

from __future__ import annotations

from torch import Tensor

from dapcal.types import Adjustment, Posterior


def is_closed(adjust: Adjustment, posterior: Posterior) -> bool:
    """Whether an adjustment sees the posterior through closed-form moments instead of draws."""
    return getattr(adjust, "closed", False) and getattr(posterior, "linear", None) is not None


def outputs_with_spread(posterior: Posterior, x: Tensor) -> Tensor:
    """Outputs of a posterior that has more than one draw."""
    outputs = posterior.outputs(x)
    if len(outputs) < 2:
        raise ValueError(
            "This posterior is a single network (MAP): it has no spread that a distance could widen. Fit a posterior "
            "to it, e.g. dapcal.posteriors.variational.fit(model, likelihood, train), or bring several networks with "
            "dapcal.posteriors.samples.from_state_dicts"
        )
    return outputs
