"""One score and one p-value for "is this input out of distribution?", apart from the predictive distribution.

The score is the sum of the standardised pieces: of the combinations tried on held-out classes and synthetic outliers
(benchmarks/evidence_combination.py) it has the best mean, and where another does better in its worst case, nothing
finds those outliers. It becomes a p-value once, on the
half of the held-out inputs that judges, so that its validity needs nothing of how the pieces depend on each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dapcal.distances import FittedSpace
from dapcal.evidence import DOUBT, Piece
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
        held_out_pieces: their standardised pieces, each ascending, (M, n); None in files of earlier versions.
    """

    stores = Stores()

    further: tuple[FittedSpace, ...]
    center: Tensor
    scale: Tensor
    held_out: Tensor
    held_out_pieces: Tensor | None = None

    def standardised(self, pieces: Tensor) -> Tensor:
        """Pieces (M, N) in units of what they vary by in distribution."""
        return (pieces.to(self.center) - self.center[:, None]) / self.scale[:, None]

    def score(self, pieces: Tensor) -> Tensor:
        """Sum of standardised pieces (M, N) -> (N,); higher = further out."""
        return self.standardised(pieces).sum(0)

    def p_value(self, score: Tensor) -> Tensor:
        """(1 + #{held-out >= score})/(n + 1): under exchangeability P(p <= a) <= a."""
        return _p_value(self.held_out, score)

    def by_name(self, pieces: Tensor, spaces: tuple[FittedSpace, ...]) -> dict[str, Piece]:
        """Every piece (M, N) standardised, and its own p-value, as valid by itself as that of the score.

        Args:
            pieces: as `pieces_of` has them.
            spaces: of the distance.
        """
        names = _different([DOUBT, *(space.name for space in (*spaces, *self.further))])
        values = self.standardised(pieces)
        if self.held_out_pieces is None:
            p_values = torch.full_like(values, torch.nan, dtype=torch.float64)
        else:
            p_values = _p_value(self.held_out_pieces, values)
        return {name: Piece(*each) for name, *each in zip(names, values, p_values, strict=True)}


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
    return replace(
        evidence,
        held_out=evidence.score(conformal).sort().values,
        held_out_pieces=evidence.standardised(conformal).sort(1).values,
    )


def _p_value(held_out: Tensor, values: Tensor) -> Tensor:
    """(1 + #{held-out >= value})/(n + 1) of values (..., N), given ascending held-out ones (..., n)."""
    n = held_out.shape[-1]
    below = torch.searchsorted(held_out, values.to(held_out).contiguous(), right=False)
    return (1 + n - below).double() / (n + 1)


def _different(names: list[str]) -> list[str]:
    """Equal names get a number: "inputs", "inputs 2"."""
    counts = [names[: place + 1].count(name) for place, name in enumerate(names)]
    return [name if count == 1 else f"{name} {count}" for name, count in zip(names, counts, strict=True)]
