"""What can be deployed: the parts of a calibrated posterior that predictions come from."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from dapcal.calibration.ood_score import Evidence
from dapcal.distances import Distance
from dapcal.types import Adjustment, Posterior


@runtime_checkable
class Fitted(Protocol):
    """What `dapcal.calibrate` returns, as far as deploying needs it."""

    @property
    def posterior(self) -> Posterior:
        """The base posterior."""
        ...

    @property
    def before(self) -> Posterior | None:
        """What inputs are doubted by that are scored, where it is not the base posterior."""
        ...

    @property
    def distance(self) -> Distance:
        """Fitted pre-distance d0."""
        ...

    @property
    def factor(self) -> float:
        """g(φ)."""
        ...

    @property
    def adjust(self) -> Adjustment:
        """How the posterior is adjusted."""
        ...

    @property
    def evidence(self) -> Evidence:
        """OOD score and p-values."""
        ...

    @property
    def example(self) -> Tensor:
        """One training input."""
        ...
