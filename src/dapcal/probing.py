"""What a network answers at a few inputs: stored beside a posterior, and asked again at loading.

Names and shapes of parameters say nothing of activations, pooling or a residual path: a network that differs in these
takes the same parameters, and predicts other numbers. Other machines round otherwise, so that answers may differ by a
share of the largest one; and since rounding may turn a choice inside a network (a route, a maximum), half of the inputs
must be answered otherwise before a network is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from dapcal.inputs import Fields
from dapcal.types import Posterior

PREFIX = "probe."  # of the tensor's name in a file, which ends in the kind of device that answered
SHARES = (1.0, 0.5, 0.25, 0.0)  # of a training input of fractions: numbers that stand for indices stay in their range
MOST_OUTPUTS = 1000  # that are stored of an input
EXACT = 1e-3  # of the largest answer: float32 and float64 on processors
ROUNDED = 0.05  # on other devices, which may multiply with ten bits
HALF = 0.2  # in half precision


class Probed(Protocol):
    """A calibrated posterior, as far as its network is asked."""

    @property
    def posterior(self) -> Posterior:
        """The base posterior."""
        ...

    @property
    def example(self) -> Tensor:
        """One training input."""
        ...

    @property
    def inputs(self) -> Fields | None:
        """The fields of an input, where it has several."""
        ...


def probe(calibrated: Probed) -> dict[str, Tensor]:
    """Answers by the name that they are stored by; none where there is no network, or it answers by chance."""
    if calibrated.posterior.network is None:
        return {}
    asked = _inputs(calibrated)
    for number in sorted({len(asked), 1}, reverse=True):
        found, again = (_answers(calibrated, asked[:number]) for _ in range(2))
        if found is not None and again is not None:
            stored = {f"{PREFIX}{calibrated.example.device.type}": found.cpu()}
            return {} if _differ(found, again, EXACT) else stored
    return {}


def check_probe(calibrated: Probed, tensors: Mapping[str, Tensor], path: object) -> None:
    """Refuse a network that answers otherwise than the one that was saved; files of earlier versions do not say."""
    for name, stored in tensors.items():
        if not name.startswith(PREFIX) or calibrated.posterior.network is None:
            continue
        found = _answers(calibrated, _inputs(calibrated)[: len(stored)]) if stored.ndim == 2 else None
        devices = {name.removeprefix(PREFIX), calibrated.example.device.type}
        tolerance = EXACT if devices == {"cpu"} else ROUNDED
        tolerance = HALF if stored.dtype in (torch.float16, torch.bfloat16) else tolerance
        if found is None or found.shape != stored.shape or _differ(stored.to(found), found, tolerance):
            raise ValueError(
                f"{path} is of another model: this one has parameters of the same names and shapes, but answers "
                "otherwise at inputs that were asked at saving; check what has no parameters, its activations, "
                "pooling, normalisation, connections between layers and what is done to inputs"
            )


def _inputs(calibrated: Probed) -> Tensor:
    """The example, and shares of it where it holds fractions."""
    example = calibrated.example
    if calibrated.inputs is not None or not example.is_floating_point():
        return example
    return torch.cat([share * example for share in SHARES])


def _answers(calibrated: Probed, x: Tensor) -> Tensor | None:
    """Mean outputs of the draws, (N, C'); None where the network cannot answer."""
    try:
        with torch.no_grad():
            outputs = calibrated.posterior.outputs(x)
    except Exception:  # of code that is not ours
        return None
    mean = outputs.mean(0).reshape(len(x), -1)
    return mean[:, :: -(-mean.shape[1] // MOST_OUTPUTS)].contiguous() if mean.isfinite().all() else None


def _differ(before: Tensor, after: Tensor, tolerance: float) -> bool:
    """Whether half of the inputs or more are answered otherwise."""
    before, after = before.double(), after.double()
    most = before.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    apart = ~((before - after).abs() <= tolerance * most).all(1)
    return int(apart.sum()) * 2 >= len(apart)
