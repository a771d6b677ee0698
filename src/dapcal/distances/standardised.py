"""Inputs that all vary alike: of a category, a rare level counts for more than a common one.

The inputs of a table's numbers vary by 1, those of a level that a share p of the rows has by √(p(1 − p)). Divided by
that, two rows of unlike levels p and q are as far apart in that column as √(1/p + 1/q) or so (the χ² distance of
correspondence analysis): next to numbers a plain 0 or 1 hardly counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dapcal.distances.projectors import Identity
from dapcal.storing import Stores
from dapcal.types import Posterior

LEAST = 0.1  # what every input varies by at least: a level that one row in a hundred has


@dataclass(frozen=True)
class Standardised:
    """Recipe: the inputs, flattened, divided by their standard deviations among training inputs."""

    def fit_projector(self, train: Tensor, posterior: Posterior) -> Scaled:  # noqa: ARG002
        """What the inputs vary by."""
        return Scaled(Identity()(train).std(0, correction=0).clamp_min(LEAST))


@dataclass(frozen=True, eq=False)
class Scaled:
    """z = x / scale."""

    stores = Stores()

    scale: Tensor  # (P,)

    def __call__(self, x: Tensor) -> Tensor:
        """Points (N, P)."""
        return Identity()(x).to(self.scale) / self.scale
