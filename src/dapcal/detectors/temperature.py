"""Temperature scaling: one number that divides all logits (Guo, Pleiss, Sun, Weinberger 2017, arXiv:1706.04599)."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dapcal.data import Data, gather
from dapcal.detectors.activations import BATCH, batches_of_logits, batchwise, checked_labels, frozen, logits_of
from dapcal.detectors.logits import entropy_of
from dapcal.networks import as_tensor
from dapcal.types import DapcalWarning

COLDEST, HOTTEST = 1e-3, 1e3


def fit(network: nn.Module, held_out: Data, *, batch_size: int = BATCH) -> Temperature:
    """T = argmin of the held-out negative log-likelihood of softmax(f(x)/T).

    Args:
        network: a trained classifier.
        held_out: inputs and labels that it was not trained on.
        batch_size: inputs per forward pass.
    """
    x, y = gather(held_out, "held_out")
    copy = frozen(network)
    logits = torch.cat(list(batches_of_logits(copy, x, batch_size))).double()
    labels = checked_labels(logits, y)
    temperature = best_temperature(logits, labels)
    if min(nll(logits, labels, edge) for edge in (COLDEST, HOTTEST)) <= nll(logits, labels, temperature):
        warnings.warn(
            f"The held-out NLL has no minimum at a temperature between {COLDEST:g} and {HOTTEST:g}: the labels are all "
            f"predicted right, or no better than by chance, and {temperature:.3g} says little; hold out more data",
            DapcalWarning,
            stacklevel=2,
        )
    return Temperature(copy, temperature, batch_size)


@dataclass(frozen=True, eq=False)
class Temperature:
    """Entropy of softmax(f(x)/T)."""

    network: nn.Module
    temperature: float
    batch_size: int = BATCH

    @property
    def scaled(self) -> Scaled:
        """The network with its logits divided by T, for any score of logits: `logits.max_softmax(fitted.scaled)`."""
        return Scaled(self.network, self.temperature)

    def probs(self, x: Tensor) -> Tensor:
        """Class probabilities (N, K)."""
        return batchwise(lambda batch: self._logits(batch).softmax(-1), x, self.batch_size)

    def __call__(self, x: Tensor) -> Tensor:
        """Scores (N,)."""
        return batchwise(lambda batch: entropy_of(self._logits(batch)), x, self.batch_size)

    def _logits(self, batch: Tensor) -> Tensor:
        return logits_of(self.network, batch).double() / self.temperature


class Scaled(nn.Module):
    """f(x)/T."""

    def __init__(self, network: nn.Module, temperature: float) -> None:
        super().__init__()
        self.network, self.temperature = network, temperature

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, K)."""
        return as_tensor(self.network(x)) / self.temperature


def best_temperature(logits: Tensor, labels: Tensor) -> float:
    """The T of smallest NLL: the NLL is convex in 1/T, so it has one minimum in log T."""
    from scipy.optimize import minimize_scalar

    def loss(log_temperature: float) -> float:
        return nll(logits, labels, math.exp(log_temperature))

    bounds = (math.log(COLDEST), math.log(HOTTEST))
    return math.exp(minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-7}).x)


def nll(logits: Tensor, labels: Tensor, temperature: float) -> float:
    """Mean of −log softmax(f/T)_y."""
    return float(nn.functional.cross_entropy(logits / temperature, labels))
