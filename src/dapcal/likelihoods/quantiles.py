"""Networks that predict quantiles, as networks of a location and a noise.

Quantiles have no likelihood here. The pinball loss of every level is an asymmetric Laplace density of its own, so that
one target would have as many densities as levels; and a distribution through the quantiles has tails that they do not
say, and which the spread of distance would have to widen. The Gaussian that fits them best has both, in closed form.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.special import ndtri


class FromQuantiles(nn.Module):
    """A network of quantiles (N, Q) of one target, as a model for `NoiseHead`: a location and a raw noise (N, 2).

    They are those of the Gaussian whose quantiles are nearest by least squares, q = location + noise · Φ⁻¹(level).
    Quantiles that cross have the smallest noise.

    Args:
        network: returns a column for every level.
        levels: of its columns, each between 0 and 1, at least two.
        floor: that of `NoiseHead`.
    """

    z: Tensor

    def __init__(self, network: nn.Module, levels: Sequence[float], floor: float = 1e-3) -> None:
        super().__init__()
        if len(set(levels)) < 2 or not all(0 < level < 1 for level in levels):
            raise ValueError(f"Expected at least 2 different `levels` between 0 and 1, got {tuple(levels)}")
        self.network = network
        self.floor = floor
        self.register_buffer("z", ndtri(torch.tensor(levels, dtype=torch.float64)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Location and raw noise side by side."""
        quantiles = self.network(x)
        if quantiles.ndim != 2 or quantiles.shape[1] != len(self.z):
            raise ValueError(
                f"Expected the network to return (N, {len(self.z)}), a quantile for every level, got "
                f"{tuple(quantiles.shape)}"
            )
        z = self.z.to(quantiles.dtype)
        centered = z - z.mean()
        noise = (quantiles @ centered / (centered @ centered))[:, None]
        location = quantiles.mean(1, keepdim=True) - noise * z.mean()
        positive = (noise - self.floor).clamp_min(1e-6)
        return torch.cat([location, positive + torch.log(-torch.expm1(-positive))], 1)  # softplus of which is positive
