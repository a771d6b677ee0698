"""The magnitude of a number, for a heavy tail: populations, prices and sizes over several orders of magnitude.

Standardised by mean and deviation, nearly all rows of such a column look the same, and a few are far away. A line in
that is what sums ask for (households of inhabitants), a line in the logarithm what proportions ask for. So both count.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

HEAVY = 10.0  # times the median, that the 99 % quantile is at least; of a log-normal number with σ = 1 it is
FEWEST = 30  # numbers other than 0, and
SHARE = 0.1  # of the rows
_LEVELS = 5  # different ones
_LOW = 0.01  # quantile of those that logarithms begin at


@dataclass(frozen=True)
class Magnitude:
    """(sign(v) · log(1 + |v|/unit) − center)/scale: a line at 0, and a logarithm beyond the smallest amounts.

    Attributes:
        unit: that amounts count in.
        center: mean of the training rows.
        scale: their standard deviation.
    """

    unit: float
    center: float
    scale: float

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Of the same shape; NaN where missing.

        >>> Magnitude(unit=1.0, center=0.0, scale=1.0)(np.array([0.0, np.expm1(2.0), -np.expm1(3.0)]))
        array([ 0.,  2., -3.])
        """
        return (_compressed(values, self.unit) - self.center) / self.scale

    def as_json(self) -> dict[str, Any]:
        """A description that `dapcal.tables.descriptions` reads back exactly."""
        return {name: value.hex() for name, value in asdict(self).items()}


def fit_magnitude(values: np.ndarray) -> Magnitude | None:
    """That of training values (N,), none of them missing; None where their tail is not heavy."""
    amounts = np.abs(values[values != 0])
    if len(amounts) < max(FEWEST, SHARE * len(values)) or len(np.unique(amounts)) < _LEVELS:
        return None
    low, median, high = (float(amount) for amount in np.quantile(amounts, [_LOW, 0.5, 0.99]))
    if not high >= HEAVY * median:
        return None
    compressed = _compressed(values, low)
    scale = float(compressed.std())
    return Magnitude(low, float(compressed.mean()), scale) if np.isfinite(scale) and scale > 0 else None


def _compressed(values: np.ndarray, unit: float) -> np.ndarray:
    with np.errstate(over="ignore"):  # infinite in that unit is refused as too far
        return np.sign(values) * np.log1p(np.abs(values) / unit)
