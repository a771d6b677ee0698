"""The radius: nothing inside a typical in-distribution distance is far."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from torch import Tensor

from dapcal.amounts import amount
from dapcal.errors import NothingToCalibrate
from dapcal.records import DapcalWarning
from dapcal.storing import Stores

UNIT_QUANTILE = 0.95
SMALLEST_UNIT = 0.01  # of the radius: ties among held-out distances would give a unit of rounding size


@dataclass(frozen=True)
class Radius:
    """d0 = max(0, (raw − start)/unit): nothing inside a typical in-distribution distance is far."""

    stores = Stores()

    start: float
    unit: float

    def __call__(self, raw: Tensor) -> Tensor:
        """Excess over the radius, in units of a typical distance."""
        return ((raw - self.start) / self.unit).clamp_min(0)


def check_measurable(raw: Tensor, name: str) -> None:
    """Refuse held-out distances (N,) that are too large to be told apart, as squares of 1e20 are in float32."""
    if not raw.double().quantile(UNIT_QUANTILE).isfinite():
        raise ValueError(
            f"Distances between held-out and training inputs in the {name} space are beyond what {raw.dtype} holds; "
            "scale the inputs, to standard deviations around 1"
        )


def fit_radius(raw: Tensor, quantile: float, name: str) -> Radius:
    """Start at a quantile of held-out distances; the unit is what lies between it and their 95 % quantile.

    The unit is at least a hundredth of the start: two quantiles this close differ by rounding alone, or nearly so
    (inputs on a grid). Two equal ones, or duplicates beyond 95 %, tell no spread at all; the unit is then the start.
    """
    if not 0 <= quantile < UNIT_QUANTILE:
        raise ValueError(f"Expected `radius` between 0 and {UNIT_QUANTILE} (or None), got {quantile}")
    check_measurable(raw, name)
    raw = raw.double()
    positive = raw[raw > 0]
    if not len(positive):
        raise NothingToCalibrate(
            f"All held-out inputs have distance 0 to the training inputs in the {name} space: there is no typical "
            "distance; hold out inputs that are not in the training set, or use radius=None"
        )
    start, upper = float(raw.quantile(quantile)), float(raw.quantile(UNIT_QUANTILE))
    if start == 0:
        start = float(positive.min())
        warnings.warn(
            f"{100 * quantile:.0f} % of the held-out inputs have distance 0 in the {name} space (duplicate rows?): the "
            f"radius starts at the smallest positive distance, {amount(start, 3)}",
            DapcalWarning,
            stacklevel=2,
        )
    return Radius(start, max(upper - start, SMALLEST_UNIT * start) if upper > start else start)
