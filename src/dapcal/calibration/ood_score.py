"""One score and one p-value for "is this input out of distribution?", apart from the predictive distribution.

The score is a weighed sum of the standardised pieces (`dapcal.calibration.weighing`), each as log(½ + ½ exp z): what is
far in one space is not made up for by what is near in another. Of the combinations tried on
held-out classes and synthetic outliers (benchmarks/evidence_combination.py) it has the best mean. Scales and weights
come from the half of the held-out inputs that chooses. The score becomes a p-value once, on the half that judges, so
that its validity needs nothing of how the pieces depend on each other.

Evidence that finds what the others are blind to, such as one wrong cell among eighty, does not join the sum, whose
noise would drown it. It stands beside it: with z of the sum and of each such piece in the same unit (0 the median, 1
the 95 % quantile, so that p is about 10^−z/2), the score is log10 Σ 10^z, the harmonic mean of p-values. Some of
them may count several times there: log10 Σ w 10^z.
"""

from __future__ import annotations

import math
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
    space of the distance, and in further spaces (normalised features, class means).

    Attributes:
        further: spaces beside those of the distance.
        center: median of each piece on held-out inputs, (M,).
        scale: its 95 % quantile minus the median, floored, (M,).
        held_out: scores of further held-out inputs, ascending, (n,).
        held_out_pieces: their standardised pieces, each ascending, (M, n); None in files of earlier versions.
        beside: how many of the last pieces stand beside the sum of the others.
        alone: places of pieces that count beside the sum, or there once more: the nearest inputs, and in files of
            earlier versions distances that also join the sum.
        times: how often each of those counts (more); once in files of earlier versions.
        sum_center: median of that sum, where pieces stand beside it.
        sum_scale: its 95 % quantile minus the median.
        weights: what each piece weighs in the sum, (M − beside,); None where all weigh the same, and in files of
            earlier versions.
        soft: whether pieces join the sum as log(½ + ½ exp z); in files of earlier versions as z.
    """

    stores = Stores()

    further: tuple[FittedSpace, ...]
    center: Tensor
    scale: Tensor
    held_out: Tensor
    held_out_pieces: Tensor | None = None
    beside: int = 0
    alone: tuple[int, ...] = ()
    times: float = 1.0
    sum_center: float = 0.0
    sum_scale: float = 1.0
    weights: Tensor | None = None
    soft: bool = False

    def standardised(self, pieces: Tensor) -> Tensor:
        """Pieces (M, N) in units of what they vary by in distribution."""
        return (pieces.to(self.center) - self.center[:, None]) / self.scale[:, None]

    def score(self, pieces: Tensor) -> Tensor:
        """Weighed sum of standardised pieces (M, N), and what stands beside it -> (N,); higher = further out."""
        return self.combined(self.standardised(pieces))

    def combined(self, standardised: Tensor) -> Tensor:
        """The same of pieces (M, N) that are standardised already."""
        joined = standardised[: len(standardised) - self.beside]
        joined = softened(joined) if self.soft else joined
        total = (joined if self.weights is None else self.weights.to(joined)[:, None] * joined).sum(0)
        if not self.beside:
            return total
        total = (total[None] - self.sum_center) / self.sum_scale
        ten = math.log(10)
        apart = standardised[[*self.alone, *range(len(standardised) - self.beside, len(standardised))]]
        more = [math.log10(self.times)] * len(self.alone) + [0.0] * self.beside
        return torch.cat([total, apart + apart.new_tensor(more)[:, None]]).mul(ten).logsumexp(0) / ten

    def p_value(self, score: Tensor) -> Tensor:
        """(1 + #{held-out >= score})/(n + 1): under exchangeability P(p <= a) <= a."""
        return _p_value(self.held_out, score)

    def by_name(self, pieces: Tensor, spaces: tuple[FittedSpace, ...]) -> dict[str, Piece]:
        """Every piece (M, N) standardised, and its own p-value, as valid by itself as that of the score.

        Args:
            pieces: as `pieces_of` has them.
            spaces: of the distance.
        """
        names = names_of((*spaces, *self.further))
        values = self.standardised(pieces)
        if self.held_out_pieces is None:
            p_values = torch.full_like(values, torch.nan, dtype=torch.float64)
        else:
            p_values = _p_value(self.held_out_pieces, values)
        return {name: Piece(*each) for name, *each in zip(names, values, p_values, strict=True)}


def names_of(spaces: tuple[FittedSpace, ...]) -> list[str]:
    """Names of the pieces: doubt, and the distance in every space."""
    return _different([DOUBT, *(space.name for space in spaces)])


def pieces_of(likelihood: Likelihood, base: Ensemble, raw: Tensor, further: Tensor) -> Tensor:
    """Evidence (M, N) from the base posterior and raw distances (spaces, N)."""
    doubt = likelihood.doubt(base)
    return torch.cat([doubt[None], raw.to(doubt), further.to(doubt)])


def fit_evidence(
    further: tuple[FittedSpace, ...], scaling: Tensor, conformal: Tensor, weights: Tensor | None = None
) -> Evidence:
    """Standardise on one part of the held-out inputs, keep the scores of the other.

    Args:
        further: spaces beside those of the distance.
        scaling: pieces (M, n) of the half that also chose φ and the radius.
        conformal: pieces (M, n') of the other half; on one and the same half p-values would not be valid.
        weights: of the pieces, (M,), from the half that chooses; by default all weigh the same.
    """
    center, scale = center_and_scale(scaling, doubt_first=True)
    evidence = Evidence(further, center, scale, torch.empty(0), weights=weights, soft=True)
    return replace(
        evidence,
        held_out=evidence.score(conformal).sort().values,
        held_out_pieces=evidence.standardised(conformal).sort(1).values,
    )


def with_beside(
    evidence: Evidence,
    spaces: tuple[FittedSpace, ...],
    scaling: tuple[Tensor, Tensor],
    conformal: tuple[Tensor, Tensor],
    alone: tuple[int, ...] = (),
    times: float = 1.0,
) -> Evidence:
    """The same evidence with further pieces that stand beside its sum.

    Args:
        evidence: of which nothing stands beside the sum.
        spaces: that measure the new pieces.
        scaling: pieces (M, n) of the half that chooses, standardised by `evidence`, and the new ones, (L, n), as they
            are measured.
        conformal: the same of the half that judges.
        alone: places of pieces that stand beside the sum (once more).
        times: how often each of those counts (more).
    """
    if evidence.beside:
        raise ValueError("Expected evidence with nothing beside its sum; give all spaces at once")
    center, scale = center_and_scale(scaling[1].to(evidence.center))
    sum_center, sum_scale = center_and_scale(evidence.combined(scaling[0])[None])
    fitted = replace(
        evidence,
        further=(*evidence.further, *spaces),
        center=torch.cat([evidence.center, center]),
        scale=torch.cat([evidence.scale, scale]),
        beside=len(spaces),
        alone=alone,
        times=times,
        sum_center=float(sum_center),
        sum_scale=float(sum_scale),
    )
    new = (conformal[1].to(center) - center[:, None]) / scale[:, None]
    pieces = torch.cat([conformal[0].to(new), new])
    return replace(
        fitted, held_out=fitted.combined(pieces).sort().values, held_out_pieces=pieces.sort(1).values.contiguous()
    )


def softened(standardised: Tensor) -> Tensor:
    """log(½ + ½ exp z): z but for a constant where it is large, 0 at the median, hardly less below it."""
    return torch.nn.functional.softplus(standardised) - math.log(2)


def center_and_scale(pieces: Tensor, doubt_first: bool = False) -> tuple[Tensor, Tensor]:
    """Median, and 95 % quantile minus the median, floored, of pieces (M, n)."""
    center = pieces.median(1).values
    spread = torch.quantile(pieces, 0.95, dim=1) - center
    # a piece that hardly varies in distribution must not swamp the others: 0.01 nats of doubt, 1 % of a distance
    floor = (0.01 * center.abs()).clamp_min(1e-12)
    if doubt_first:
        floor[0] = 0.01
    return center, torch.maximum(spread, floor)


def _p_value(held_out: Tensor, values: Tensor) -> Tensor:
    """(1 + #{held-out >= value})/(n + 1) of values (..., N), given ascending held-out ones (..., n)."""
    n = held_out.shape[-1]
    below = torch.searchsorted(held_out, values.to(held_out).contiguous(), right=False)
    return (1 + n - below).double() / (n + 1)


def _different(names: list[str]) -> list[str]:
    """Equal names get a number: "inputs", "inputs 2"."""
    counts = [names[: place + 1].count(name) for place, name in enumerate(names)]
    return [name if count == 1 else f"{name} {count}" for name, count in zip(names, counts, strict=True)]
