"""Simple synthetic outliers made of held-out inputs: what a useful distance should find farther."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate


def synthetic(train: Tensor, held_out: Tensor) -> dict[str, Tensor]:
    """Simple outliers made of held-out inputs."""
    generator = torch.Generator().manual_seed(0)
    low, high = train.amin(0), train.amax(0)
    if not train.is_floating_point():
        return {"shuffled": shuffled(held_out, generator)}
    if held_out.ndim == 4 and min(held_out.shape[2:]) >= 4:
        size = held_out.shape[2:]
        small = avg_pool2d(held_out, max(2, min(size) // 4))
        return {
            "blurred": interpolate(small, size=size, mode="bilinear", align_corners=False),
            "constant": noise((len(held_out), 1, 1, 1), low.amin(), high.amax(), generator).expand_as(held_out),
            "noise": noise(held_out.shape, low.amin(), high.amax(), generator),
            "mixed": 0.5 * (held_out + held_out.flip(0)),
        }
    wide = noise(held_out.shape, low, high, generator, width=3)
    if held_out[0].numel() == 1:
        return {"noise": wide}
    return {"noise": wide, "shuffled": shuffled(held_out, generator)}


def noise(shape: Sequence[int], low: Tensor, high: Tensor, generator: torch.Generator, width: float = 1) -> Tensor:
    """Uniform in the box between `low` and `high`, or in one around its middle that is `width` times as wide."""
    uniform = torch.rand(tuple(shape), generator=generator).to(low)
    return low + (width * uniform - (width - 1) / 2) * (high - low)


def shuffled(x: Tensor, generator: torch.Generator) -> Tensor:
    """Inputs (N, ...) whose every value is that of another one: each is ordinary, their combination is not."""
    flat = x.flatten(1)
    order = torch.rand(flat.shape, generator=generator).argsort(0).to(x.device)
    return flat.gather(0, order).reshape(x.shape)
