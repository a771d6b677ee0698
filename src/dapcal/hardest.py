"""Which held-out inputs are hard: those predicted worst stand for errors where there are too few."""

from __future__ import annotations

from torch import Tensor

from dapcal.ensembles import Evaluated
from dapcal.likelihoods import Likelihood

FEWEST = 10  # errors that say something
HARDEST = 0.3  # share of the held-out inputs that stand for errors where there are fewer


def hardest(likelihood: Likelihood, held_out: Evaluated, fraction: float = HARDEST) -> Tensor:
    """Rows of the inputs that are predicted worst, by log predictive density."""
    number = max(1, round(fraction * len(held_out.x)))
    y = held_out.y.to(held_out.base.outputs.device)
    return likelihood.log_prob(held_out.base, y).argsort()[:number].cpu()
