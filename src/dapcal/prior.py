"""The distance-aware prior p(θ | ξ) = N(0, (σ0 + d)² I), per parameter group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from dapcal.storing import Stores

Aware = str | Sequence[str] | Mapping[str, float]
"""Which parameters the distance widens: name patterns, or patterns with a factor on the distance each."""


@dataclass(frozen=True, eq=False)
class Prior:
    """σ0 and the distance's factor a for G groups of parameters: θ_g ~ N(0, (σ0_g + a_g d)² I).

    A group with a = 0 keeps its ordinary prior (the paper's toy regression: the noise network). The paper's main
    text has one group with a = 1.
    """

    stores = Stores()

    labels: tuple[str, ...]  # G
    sigma0: Tensor  # (G,) float64
    factor: Tensor  # (G,) float64
    group: Tensor  # (P,) index of each parameter's group
    sizes: Tensor  # (G,) number of parameters, float64

    @property
    def lead(self) -> float:
        """Largest a/σ0 over the groups: d · lead is the distance in units of the prior."""
        return float((self.factor / self.sigma0).max())

    def to(self, device: torch.device) -> Prior:
        """The same prior on another device."""
        tensors = (t.to(device) for t in (self.sigma0, self.factor, self.group, self.sizes))
        return Prior(self.labels, *tensors)

    def precision_drop(self, distance: Tensor) -> Tensor:
        """C = 1/σ0² − 1/(σ0 + a d)², by how much the prior precision falls (the paper's 1/γ²).

        Args:
            distance: d, (N,).

        Returns:
            c in [0, 1/σ0²), (N, G) in float64.
        """
        relative = self._relative(distance)  # (N, G)
        # 1 − 1/(1 + r)² written so that small r loses no digits, and rounded down: c σ0² < 1 also for huge r
        share = (relative * (2 + relative) / (1 + relative) ** 2).clamp_max(1 - 2**-50)
        return share / self.sigma0**2

    def widening(self, distance: Tensor) -> Tensor:
        """K = (σ0 + a d)/σ0 of the group that widens most, (N,): the envelope that Inflate uses."""
        return 1 + distance.double() * self.lead

    def log_widening(self, distance: Tensor) -> Tensor:
        """log((σ0 + a d)/σ0) per group, (N, G)."""
        return torch.log1p(self._relative(distance))

    def _relative(self, distance: Tensor) -> Tensor:
        return distance.to(self.sigma0)[:, None] * (self.factor / self.sigma0)


def make_prior(
    sizes: Mapping[str, int],
    prior_scale: float | Mapping[str, float],
    aware: Aware = "*",
    device: torch.device | None = None,
) -> Prior:
    """Group named parameters by their σ0 and their factor on the distance.

    Args:
        sizes: number of entries of each parameter, by name, in the order of the flat parameter vector.
        prior_scale: σ0, one for all or by name pattern (first match counts).
        aware: patterns (`fnmatch`) of the parameters that the distance widens, or pattern -> factor a.
        device: where the prior's tensors live.

    >>> prior = make_prior({"mean.weight": 3, "noise.weight": 2}, 1.0, aware="mean.*")
    >>> prior.labels, prior.factor.tolist(), prior.group.tolist()
    (('mean.*', 'not distance-aware'), [1.0, 0.0], [0, 0, 0, 1, 1])
    """
    factors = _as_factors(aware)
    unused = [p for p in factors if not any(fnmatchcase(name, p) for name in sizes)]
    if unused:
        raise ValueError(
            f"Expected `aware` to match parameter names, but {unused} match none; the names are {list(sizes)}"
        )
    scales = prior_scale if isinstance(prior_scale, Mapping) else {"*": prior_scale}
    unused = [p for p in scales if not any(fnmatchcase(name, p) for name in sizes)]
    if unused:
        raise ValueError(
            f"Expected `prior_scale` to match parameter names, but {unused} match none; the names are {list(sizes)}"
        )
    groups: dict[tuple[float, float], list[str]] = {}
    labels: dict[tuple[float, float], dict[str, None]] = {}  # a group may have several patterns, in order
    for name in sizes:
        label = next((p for p in factors if fnmatchcase(name, p)), "not distance-aware")
        pattern = next((p for p in scales if fnmatchcase(name, p)), None)
        if pattern is None:
            raise ValueError(
                f"Expected `prior_scale` to cover every parameter, but no pattern of {list(scales)} matches "
                f"`{name}`; add it, or a last pattern '*'"
            )
        sigma0 = float(scales[pattern])
        if not (sigma0 > 0 and sigma0 < float("inf")):
            raise ValueError(f"Expected `prior_scale` (sigma0) > 0 for `{name}`, got {sigma0}")
        own = sigma0, factors.get(label, 0.0)
        groups.setdefault(own, []).append(name)
        labels.setdefault(own, {})[label] = None
    if not any(factor for _, factor in groups):
        raise ValueError(
            f"Expected `aware` to widen some parameter, but the first match counts and gives all of them 0: {aware!r}"
        )
    index = {name: g for g, names in enumerate(groups.values()) for name in names}
    prior = Prior(
        labels=tuple(", ".join(labels[own]) for own in groups),
        sigma0=torch.tensor([s for s, _ in groups], dtype=torch.float64),
        factor=torch.tensor([a for _, a in groups], dtype=torch.float64),
        group=torch.cat([torch.full((n,), index[name]) for name, n in sizes.items()]),
        sizes=torch.tensor([sum(sizes[n] for n in names) for names in groups.values()], dtype=torch.float64),
    )
    return prior if device is None else prior.to(device)


def _as_factors(aware: Aware) -> dict[str, float]:
    if isinstance(aware, Mapping):
        factors = {p: float(a) for p, a in aware.items()}
    else:
        factors = dict.fromkeys([aware] if isinstance(aware, str) else aware, 1.0)
    if not factors or not all(0 <= a < float("inf") for a in factors.values()) or not any(factors.values()):
        raise ValueError(f"Expected `aware` to name parameters with factors >= 0, at least one positive, got {aware!r}")
    return factors
