"""g(φ): positive factors by which a pre-distance is multiplied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dapcal.storing import Stores


@dataclass(frozen=True)
class Exp:
    """g(φ) = exp(φ), the paper's choice.

    >>> Exp()(torch.tensor(0.0)).item()
    1.0
    """

    stores = Stores()

    def __call__(self, phi: Tensor) -> Tensor:
        """g(φ)."""
        return phi.exp()

    def inverse(self, factor: Tensor) -> Tensor:
        """φ = log factor."""
        return factor.log()


@dataclass(frozen=True)
class Softplus:
    """g(φ) = log(1 + exp(φ)): like exp for small factors, linear for large ones."""

    stores = Stores()

    def __call__(self, phi: Tensor) -> Tensor:
        """g(φ)."""
        return torch.nn.functional.softplus(phi)

    def inverse(self, factor: Tensor) -> Tensor:
        """φ = factor + log(1 − exp(−factor))."""
        return factor + torch.log(-torch.expm1(-factor))


@dataclass(frozen=True)
class ScaledSigmoid:
    """g(φ) = upper / (1 + exp(−φ)): the factor stays under `upper`."""

    stores = Stores()

    upper: float

    def __post_init__(self) -> None:
        if not self.upper > 0:
            raise ValueError(f"Expected `upper` > 0, got {self.upper}")

    def __call__(self, phi: Tensor) -> Tensor:
        """g(φ)."""
        return self.upper * torch.sigmoid(phi)

    def inverse(self, factor: Tensor) -> Tensor:
        """φ = log(factor / (upper − factor)); inf where factor >= upper."""
        return torch.logit((factor / self.upper).clamp(0, 1))
