"""What each piece of evidence weighs in the OOD score: the less it tells that others do not, the less.

Asked are near outliers made of the half of the held-out inputs that chooses (`dapcal.distances.outliers.near`). With m
the differences between the means of the pieces over outliers and over held-out inputs, and S the sum of their
covariances, the weights are the non-negative w that maximise wᵀm − ½ wᵀ(S + λ diag S + ε I)w: a linear discriminant
(Fisher 1936), shrunk, so that pieces that say the same share their weight. The largest is 1. Doubt weighs at least half
of that, since it alone says "ambiguous", which made-up outliers do not ask for. λ was fixed on held-out classes of
images and tables (benchmarks/evidence_combination.py) and of CIFAR-10 with wide ResNets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dapcal.calibration.ood_score import center_and_scale, names_of, pieces_of, softened
from dapcal.distances import raw_in
from dapcal.distances.choosing import Measured
from dapcal.distances.outliers import near
from dapcal.distances.verdicts import listed
from dapcal.networks import reads, shared
from dapcal.types import Adjustment, Posterior

RIDGE = 4.0  # λ
FLOOR = 1e-3  # ε, variance that every piece has at least
FARTHEST = 10.0  # standardised: what lies beyond is as far; a few outliers must not make the covariance
LEAST_DOUBT = 0.5  # of the largest weight
PROBES = 150  # held-out inputs that outliers of each kind are made of; more tell no better, and cost


class Weighed(NamedTuple):
    """Weights of the pieces (M,), None where all weigh the same, and what is to be said of them."""

    weights: Tensor | None
    notes: tuple[str, ...] = ()


def weigh(
    posterior: Posterior, adjust: Adjustment, measured: Measured, train: Tensor, held_out: Tensor, inside: Tensor
) -> Weighed:
    """Weights of the pieces of a posterior's evidence.

    Doubt alone has nothing to be weighed against. Predictions of a function that the user brings are not asked for at
    made-up inputs, which may cost or fail: there all pieces weigh the same.

    Args:
        posterior: which doubts.
        adjust: how it is read at inputs.
        measured: where distances are measured.
        train: training inputs.
        held_out: inputs of the half that chooses, (n, ...).
        inside: their pieces of evidence, (M, n).
    """
    if len(inside) == 1 or posterior.network is None:
        return Weighed(None)
    outside = {}
    for kind, x in near(train, held_out[:PROBES], reads(posterior.network)).items():
        with shared(posterior.network, x):
            base = adjust(posterior, x)(torch.zeros(len(x), device=x.device))
            raw, further = measured.distance.raw(x), raw_in(measured.further, x)
        outside[kind] = pieces_of(posterior.likelihood, base, raw, further)
    weights = weights_of(*standardised(inside, list(outside.values())))
    names = names_of((*measured.distance.spaces, *measured.further))
    told = ", ".join(f"{name} {weight:.2f}" for name, weight in zip(names, weights.tolist(), strict=True))
    return Weighed(weights, (f"weights in the OOD score, by {listed(list(outside))} outliers: {told}",))


def standardised(inside: Tensor, outside: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Pieces (M, n) of held-out inputs and of outliers in units of what they vary by among the former."""
    center, scale = center_and_scale(inside.double(), doubt_first=True)
    found = [(pieces.double() - center[:, None]) / scale[:, None] for pieces in (inside, *outside)]
    return found[0], found[1:]


def weights_of(inside: Tensor, outside: Sequence[Tensor]) -> Tensor:
    """Weights (M,) by how well the pieces tell outliers from held-out inputs; 1 each where none tells anything.

    Args:
        inside: standardised pieces (M, n) of held-out inputs, doubt first.
        outside: standardised pieces (M, n') of each kind of outlier.
    """
    ones = torch.ones(len(inside), dtype=torch.float64, device=inside.device)
    if not outside:
        return ones
    own, *kinds = (softened(kind.double().nan_to_num(0.0)).clamp_max(FARTHEST) for kind in (inside, *outside))
    m = torch.stack([kind.mean(1) for kind in kinds]).mean(0) - own.mean(1)
    covariance = _covariance(own) + torch.stack([_covariance(kind) for kind in kinds]).mean(0)
    shrunk = covariance + torch.diag(RIDGE * covariance.diagonal() + FLOOR)
    weights = ones.new_tensor(_largest(shrunk.cpu().numpy(), m.cpu().numpy()))
    if not weights.any():
        return ones
    weights = weights / weights.max()
    weights[0] = weights[0].clamp_min(LEAST_DOUBT)
    return weights


def _covariance(pieces: Tensor) -> Tensor:
    """(M, M) of pieces (M, n)."""
    return torch.atleast_2d(torch.cov(pieces, correction=0))


def _largest(quadratic: np.ndarray, linear: np.ndarray) -> np.ndarray:
    """The w >= 0 with the largest wᵀb − ½ wᵀA w: least squares of Lᵀw − L⁻¹b with L Lᵀ = A."""
    from scipy.optimize import nnls

    factor = np.linalg.cholesky(quadratic)
    return nnls(factor.T, np.linalg.solve(factor, linear))[0]
