"""Parts of predictions that estimators show, as arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from dapcal.predictive import Prediction

COMMON: dict[str, Callable[[Prediction], Tensor]] = {
    "epistemic": lambda prediction: prediction.epistemic.flatten(),  # one target: (N, 1)
    "aleatoric": lambda prediction: prediction.aleatoric.flatten(),
    "distance": lambda prediction: prediction.distance,
    "ood_p_value": lambda prediction: prediction.ood_p_value,
}


def plain(value: Tensor | list[str]) -> np.ndarray:
    """Numbers in float64; texts as they are."""
    return value.double().numpy() if isinstance(value, Tensor) else np.array(value, object)


def mean_of(prediction: Prediction) -> Tensor:
    """Of one target, (N,)."""
    return prediction.mean[:, 0]


def std_of(prediction: Prediction) -> Tensor:
    """Standard deviation of one target, (N,)."""
    return prediction.variance[:, 0].sqrt()


def ends_of(level: float) -> tuple[Callable[[Prediction], Tensor], Callable[[Prediction], Tensor]]:
    """Lower and upper end of the interval that holds one target with probability `level`, (N,) each."""
    return lambda p: p.interval(level).lower[:, 0], lambda p: p.interval(level).upper[:, 0]
