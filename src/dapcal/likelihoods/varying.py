"""Noise that depends on the row, read off what the draws say of it: their mean, and how far they are apart."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from dapcal.likelihoods.conformal import Conformal
from dapcal.likelihoods.normal import NormalLikelihood
from dapcal.storing import Stores


@dataclass(frozen=True)
class VaryingNoise(NormalLikelihood):
    """Gaussian targets with noise · exp(h(mean of the draws) + slope · log(their standard deviation)).

    h is piecewise linear between knots and constant beyond them, and the draws' standard deviation counts as no less
    and no more than was seen: far from the data the noise is one that was seen, and all else is the distance's.

    Attributes:
        noise: where h is 0 and the draws are `apart[0]` apart.
        knots: of the mean, ascending.
        heights: h at the knots.
        slope: of the log of the draws' standard deviation.
        apart: typical, least and greatest standard deviation of the draws.
        conformal: what intervals are widened by.
    """

    stores = Stores()

    noise: float
    knots: tuple[float, ...]
    heights: tuple[float, ...]
    slope: float = 0.0
    apart: tuple[float, float, float] = (1.0, 1.0, 1.0)
    conformal: Conformal | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.knots, Tensor):  # of a deployed module, whose numbers were checked
            return
        if not 0 < self.noise < float("inf"):
            raise ValueError(f"Expected `noise` > 0, got {self.noise}")
        if not self.knots or len(self.knots) != len(self.heights):
            raise ValueError(
                f"Expected a height for every knot, got {len(self.heights)} heights and {len(self.knots)} knots"
            )
        if not all(one < two for one, two in pairwise(self.knots)):
            raise ValueError(f"Expected `knots` to ascend, got {self.knots}")
        typical, least, greatest = self.apart
        if not 0 < least <= greatest or not typical > 0:
            raise ValueError(f"Expected `apart` as typical, least and greatest deviation > 0, got {self.apart}")

    def _location_and_noise(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        draws = outputs if outputs.ndim == 3 else outputs[None]  # (S, N, K)
        typical, least, greatest = self.apart
        height = places(draws.mean(0), self.knots) @ torch.as_tensor(self.heights).to(draws)  # (N, K)
        if len(draws) > 1:
            apart = draws.std(0, correction=0).clamp(least, greatest)
            height = height + self.slope * (apart / typical).log()
        return outputs, self.noise * height.exp()

    def rescaled(self, factor: float) -> VaryingNoise:
        """Noise times `factor`."""
        return replace(self, noise=self.noise * factor)

    def check(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Targets (N, K), or (N,) for one."""
        return self._check_targets(y, outputs.shape[-2], outputs.shape[-1])


def places(value: Tensor, knots: tuple[float, ...]) -> Tensor:
    """Shares of the knots that a value lies between, (..., J): they sum to one, and at most two are not zero.

    >>> places(torch.tensor([0.0, 1.5, 9.0]), (0.0, 1.0, 3.0))
    tensor([[1.0000, 0.0000, 0.0000],
            [0.0000, 0.7500, 0.2500],
            [0.0000, 0.0000, 1.0000]])
    """
    if len(knots) == 1:
        return torch.ones_like(value)[..., None]
    edges = torch.as_tensor(knots).to(value)
    inside = ((value[..., None] - edges[:-1]) / edges.diff()).clamp(0, 1)  # (..., J − 1)
    one = torch.ones_like(inside[..., :1])
    return torch.cat([one, inside], -1) - torch.cat([inside, torch.zeros_like(one)], -1)
