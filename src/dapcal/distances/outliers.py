"""Simple synthetic outliers made of held-out inputs: what a useful distance should find farther."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate


def synthetic(train: Tensor, held_out: Tensor) -> dict[str, Tensor]:
    """Simple outliers made of held-out inputs."""
    generator = torch.Generator().manual_seed(0)
    n = len(held_out)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator).to(held_out.device, train.dtype)

    low, high = train.amin(0), train.amax(0)
    if not train.is_floating_point():
        return {"shuffled": _shuffled(held_out, generator)}
    if held_out.ndim == 4 and min(held_out.shape[2:]) >= 4:
        size = held_out.shape[2:]
        small = avg_pool2d(held_out, max(2, min(size) // 4))
        return {
            "blurred": interpolate(small, size=size, mode="bilinear", align_corners=False),
            "constant": (low.amin() + uniform(n, 1, 1, 1) * (high.amax() - low.amin())).expand_as(held_out),
            "noise": low.amin() + uniform(*held_out.shape) * (high.amax() - low.amin()),
            "mixed": 0.5 * (held_out + held_out.flip(0)),
        }
    noise = low + (3 * uniform(*held_out.shape) - 1) * (high - low)  # a box three times as wide
    if held_out[0].numel() == 1:
        return {"noise": noise}
    return {"noise": noise, "shuffled": _shuffled(held_out, generator)}


def _shuffled(x: Tensor, generator: torch.Generator) -> Tensor:
    """Every column in an order of its own."""
    flat = x.flatten(1)
    order = torch.rand(flat.shape, generator=generator).argsort(0).to(x.device)
    return flat.gather(0, order).reshape(x.shape)
