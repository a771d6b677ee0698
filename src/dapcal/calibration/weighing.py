"""What each piece of evidence weighs in the OOD score: the less it tells, the less.

Asked are near outliers made of the half of the held-out inputs that chooses (`dapcal.distances.outliers.near`). With a
the AUROC of a piece for them, its mean over their kinds, the weight is (a − ½)⁴, or 0 where a < ½, in units of the
largest. Doubt weighs at least half of that, since it alone says "ambiguous", which made-up outliers do not ask for.
The power was fixed on held-out classes (benchmarks/evidence_combination.py, and ResNets on CIFAR-10): lower ones let
weak distances drown a doubt that tells more, higher ones trust the AUROC of few inputs too much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.calibration.ood_score import names_of, pieces_of
from dapcal.distances import raw_in
from dapcal.distances.choosing import Measured
from dapcal.distances.outliers import near
from dapcal.distances.verdicts import listed
from dapcal.networks import reads, shared
from dapcal.ranks import auroc
from dapcal.types import Adjustment, Posterior

POWER = 4
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
    weights = weights_of(inside, list(outside.values()))
    names = names_of((*measured.distance.spaces, *measured.further))
    told = ", ".join(f"{name} {weight:.2f}" for name, weight in zip(names, weights.tolist(), strict=True))
    return Weighed(weights, (f"weights in the OOD score, by {listed(list(outside))} outliers: {told}",))


def weights_of(inside: Tensor, outside: Sequence[Tensor]) -> Tensor:
    """Weights (M,) by how well each piece tells outliers from held-out inputs; 1 each where none tells anything.

    Args:
        inside: pieces (M, n) of held-out inputs, doubt first.
        outside: pieces (M, n') of each kind of outlier.
    """
    told = [[auroc(far, own) for far, own in zip(kind, inside, strict=True)] for kind in outside]
    ones = torch.ones(len(inside), dtype=torch.float64, device=inside.device)
    if not told:
        return ones
    power = (ones.new_tensor(told).mean(0) - 0.5).clamp_min(0) ** POWER
    if not power.any():
        return ones
    weights = power / power.max()
    weights[0] = weights[0].clamp_min(LEAST_DOUBT)
    return weights
