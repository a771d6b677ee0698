"""One score and one p-value for "is this input out of distribution?", apart from the predictive distribution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dapcal.distances import FittedSpace
from dapcal.likelihoods import Likelihood
from dapcal.storing import Stores
from dapcal.types import Ensemble


@dataclass(frozen=True, eq=False)
class Evidence:
    """Standardised pieces of evidence, summed, and the held-out scores that p-values are read from.

    The pieces are the uncalibrated predictive entropy (regression: log epistemic variance), the raw distance in every
    space of the distance, and in further spaces (normalised features).

    Attributes:
        further: spaces beside those of the distance.
        center: median of each piece on held-out inputs, (M,).
        scale: its 95 % quantile minus the median, floored, (M,).
        held_out: scores of further held-out inputs, ascending, (n,).
    """

    stores = Stores()

    further: tuple[FittedSpace, ...]
    center: Tensor
    scale: Tensor
    held_out: Tensor

    def score(self, pieces: Tensor) -> Tensor:
        """Sum of standardised pieces (M, N) -> (N,); higher = further out."""
        pieces = pieces.to(self.center)
        return ((pieces - self.center[:, None]) / self.scale[:, None]).sum(0)

    def p_value(self, score: Tensor) -> Tensor:
        """(1 + #{held-out >= score})/(n + 1): under exchangeability P(p <= a) <= a."""
        n = len(self.held_out)
        below = torch.searchsorted(self.held_out, score.to(self.held_out), right=False)
        return (1 + n - below).double() / (n + 1)


def pieces_of(likelihood: Likelihood, base: Ensemble, raw: Tensor, further: Tensor) -> Tensor:
    """Evidence (M, N) from the base posterior and raw distances (spaces, N)."""
    doubt = likelihood.doubt(base)
    return torch.cat([doubt[None], raw.to(doubt), further.to(doubt)])


def fit_evidence(further: tuple[FittedSpace, ...], scaling: Tensor, conformal: Tensor) -> Evidence:
    """Standardise on one part of the held-out inputs, keep the scores of the other.

    Args:
        further: spaces beside those of the distance.
        scaling: pieces (M, n) of the half that also chose φ and the radius.
        conformal: pieces (M, n') of the other half; on one and the same half p-values would not be valid.
    """
    center = scaling.median(1).values
    spread = torch.quantile(scaling, 0.95, dim=1) - center
    # a piece that hardly varies in distribution must not swamp the others: 0.01 nats of doubt, 1 % of a distance
    floor = (0.01 * center.abs()).clamp_min(1e-12)
    floor[0] = 0.01
    evidence = Evidence(further, center, torch.maximum(spread, floor), torch.empty(0))
    scores = evidence.score(conformal).sort().values
    return Evidence(further, center, evidence.scale, scores)
