"""Records and numbers that everything shares, down to likelihoods and files; `dapcal.types` hands them on."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

ALPHA = 0.05
"""Inputs with a p-value up to this are flagged, where nobody asks for another."""

LEVEL = 0.95
"""Probability that an interval holds the target, where nobody asks for another."""


class DapcalWarning(UserWarning):
    """Something was decided or degraded that the user should know of; the message says what to do."""


class Conditional(NamedTuple):
    """Moments of p(y | θ_s, x_n) for every draw: all that predictions need of a likelihood, computed once."""

    mean: Tensor  # (S, N, K) class or label probabilities, or the expected target
    variance: Tensor  # (S, N) for classes: 1 − Σ p²; (S, N, K) for labels and targets
    entropy: Tensor  # (S, N)


class Ensemble(NamedTuple):
    """Weighted draws of a network's outputs: an (adjusted) posterior seen at N inputs.

    A posterior expectation is `Σ_s exp(log_weights[s]) · f(outputs[s])`. The base posterior has weights 1/S.
    """

    outputs: Tensor  # (S, N, C)
    conditional: Conditional
    log_weights: Tensor  # (S, N), float64
    spread: Tensor  # (N, K) or (N, 1) variance of the location outputs still to be added analytically
    importance: Tensor | None = None  # (S, N) log weights before they were normalised or completed
