"""Simple synthetic outliers made of held-out inputs: what a useful distance should find farther.

Far ones (noise, constant images) tell whether a distance may count. Near ones, each part of which is ordinary, tell how
much: of the kinds tried, these stand best for classes that were left out of training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from dapcal.inputs import Fields, mask_of


def synthetic(train: Tensor, held_out: Tensor, fields: Fields | None = None) -> dict[str, Tensor]:
    """Simple outliers made of held-out inputs; of those with several fields, packed, these are shuffled."""
    generator = torch.Generator().manual_seed(0)
    if fields is not None:
        return {"shuffled": shuffled_fields(held_out, fields, generator)}
    low, high = train.amin(0), train.amax(0)
    if not train.is_floating_point():
        return {"shuffled": shuffled(held_out, generator)}
    if _are_images(held_out):
        size = held_out.shape[2:]
        small = avg_pool2d(held_out, max(2, min(size) // 4))
        return {
            "blurred": interpolate(small, size=size, mode="bilinear", align_corners=False),
            "constant": noise((len(held_out), 1, 1, 1), low.amin(), high.amax(), generator).expand_as(held_out),
            "noise": noise(held_out.shape, low.amin(), high.amax(), generator),
            "mixed": mixed(held_out),
        }
    wide = noise(held_out.shape, low, high, generator, width=3)
    if held_out[0].numel() == 1:
        return {"noise": wide}
    return {"noise": wide, "shuffled": shuffled(held_out, generator)}


def near(train: Tensor, held_out: Tensor, fields: Fields | None = None) -> dict[str, Tensor]:
    """Outliers that are hard to find.

    Of images halves of two, turned ones and mixed ones; of sequences halves of two, ones whose halves change places,
    and mixed ones; else the simple ones.
    """
    if fields is None and _are_images(held_out):
        return {"halves": halves(held_out), "turned": turned(held_out), "mixed": mixed(held_out)}
    if fields is None and _are_sequences(held_out):
        time = 2 if held_out.shape[2] >= held_out.shape[1] else 1
        return {"halves": halves(held_out, time), "swapped": swapped(held_out, time), "mixed": mixed(held_out)}
    return synthetic(train, held_out, fields)


def halves(x: Tensor, along: int = 3) -> Tensor:
    """The first half of each input beside the second half of another; of images (N, C, H, W) left and right."""
    middle = x.shape[along] // 2
    return torch.cat([x.narrow(along, 0, middle), x.flip(0).narrow(along, middle, x.shape[along] - middle)], along)


def swapped(x: Tensor, along: int) -> Tensor:
    """Inputs whose second half comes first."""
    return x.roll(-(x.shape[along] // 2), along)


def turned(x: Tensor) -> Tensor:
    """Images (N, C, H, W) turned by a quarter, or upside down where they are not square."""
    return x.rot90(1 if x.shape[2] == x.shape[3] else 2, (2, 3))


def mixed(x: Tensor) -> Tensor:
    """The mean of each input and another one."""
    return 0.5 * (x + x.flip(0))


def noise(shape: Sequence[int], low: Tensor, high: Tensor, generator: torch.Generator, width: float = 1) -> Tensor:
    """Uniform in the box between `low` and `high`, or in one around its middle that is `width` times as wide."""
    uniform = torch.rand(tuple(shape), generator=generator).to(low)
    return low + (width * uniform - (width - 1) / 2) * (high - low)


def shuffled(x: Tensor, generator: torch.Generator) -> Tensor:
    """Inputs (N, ...) whose every value is that of another one: each is ordinary, their combination is not."""
    flat = x.flatten(1)
    order = torch.rand(flat.shape, generator=generator).argsort(0).to(x.device)
    return flat.gather(0, order).reshape(x.shape)


def shuffled_fields(x: Tensor, fields: Fields, generator: torch.Generator) -> Tensor:
    """Packed inputs whose every value is that of another one which has this place; masks stay as they are."""
    parts = fields.unpack(x)
    name = mask_of(parts)
    mask = None if name is None else parts[name] != 0  # (N, length)
    for key, part in parts.items():
        if "mask" in key:
            continue
        values = part.reshape(len(part), -1)
        present = torch.ones_like(values, dtype=torch.bool)
        if mask is not None and part.shape[:2] == mask.shape:
            present = mask.reshape(*mask.shape, *[1] * (part.ndim - 2)).expand_as(part).reshape(values.shape)
        noise = torch.rand(values.shape, generator=generator).to(x.device)
        source = (noise - 2 * present.float()).argsort(0)  # those that have the place come first, at random
        target = (~present).to(torch.uint8).argsort(dim=0, stable=True)  # and in order
        parts[key] = torch.empty_like(values).scatter(0, target, values.gather(0, source)).reshape(part.shape)
    return fields.pack(parts, "held_out")


def _are_sequences(x: Tensor) -> bool:
    """Of numbers or vectors, (N, channels, time) or (N, time, channels): time is longer."""
    return x.is_floating_point() and x.ndim == 3 and max(x.shape[1:]) >= 4


def _are_images(x: Tensor) -> bool:
    return x.is_floating_point() and x.ndim == 4 and min(x.shape[2:]) >= 4
