"""Scores of the logits alone: max softmax, entropy, energy, max logit. Nothing to fit.

Logits are scored in float64, and 1 − max softmax is computed from the classes that lose, so that confident predictions
do not tie at a probability of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dapcal.detectors.activations import BATCH, batchwise, frozen, logits_of


def max_softmax(network: nn.Module, *, batch_size: int = BATCH) -> LogitScore:
    """1 − max_k softmax(f(x))_k (Hendrycks, Gimpel 2017, arXiv:1610.02136)."""
    return LogitScore(frozen(network), doubt, batch_size)


def entropy(network: nn.Module, *, batch_size: int = BATCH) -> LogitScore:
    """−Σ_k p_k log p_k of p = softmax(f(x))."""
    return LogitScore(frozen(network), entropy_of, batch_size)


def energy(network: nn.Module, *, temperature: float = 1.0, batch_size: int = BATCH) -> LogitScore:
    """−T log Σ_k exp(f_k(x)/T) (Liu, Wang, Owens, Li 2020, arXiv:2010.03759).

    Args:
        network: a trained classifier.
        temperature: T.
        batch_size: inputs per forward pass.
    """
    if not temperature > 0:
        raise ValueError(f"Expected `temperature` > 0, got {temperature}")

    def score(logits: Tensor) -> Tensor:
        return -temperature * torch.logsumexp(logits / temperature, -1)

    return LogitScore(frozen(network), score, batch_size)


def max_logit(network: nn.Module, *, batch_size: int = BATCH) -> LogitScore:
    """−max_k f_k(x) (Hendrycks et al. 2022, arXiv:1911.11132)."""
    return LogitScore(frozen(network), lambda logits: -logits.max(-1).values, batch_size)


@dataclass(frozen=True, eq=False)
class LogitScore:
    """A function of the logits of one frozen network."""

    network: nn.Module
    score: Callable[[Tensor], Tensor]  # (N, K) in float64 -> (N,)
    batch_size: int = BATCH

    def __call__(self, x: Tensor) -> Tensor:
        """Scores (N,)."""
        return batchwise(lambda batch: self.score(logits_of(self.network, batch).double()), x, self.batch_size)


def entropy_of(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits), (N, K) -> (N,)."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1).clamp_max(0)


def doubt(logits: Tensor) -> Tensor:
    """1 − max softmax(logits) without cancellation, (N, K) -> (N,)."""
    return torch.sigmoid(-margin(logits))


def margin(logits: Tensor) -> Tensor:
    """log-odds of the predicted class: log p_max − log(1 − p_max) = f_max − log Σ_{k ≠ max} exp f_k, (N, K) -> (N,)."""
    top, others = logits.sort(-1, descending=True).values.split([1, logits.shape[-1] - 1], -1)
    return top[:, 0] - torch.logsumexp(others, -1)
