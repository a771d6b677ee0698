"""Colours that numbers are drawn in: a palette, and images in it."""

from __future__ import annotations

import torch
from torch import Tensor

from dapcal.png import png

_ANCHORS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Viridis in five colours (van der Walt and Smith): even steps of lightness, told apart by the colour-blind."""


def palette(count: int) -> list[tuple[int, int, int]]:
    """Colours from dark to bright, evenly spaced."""
    anchors = torch.tensor(_ANCHORS, dtype=torch.float64)
    place = torch.linspace(0, len(anchors) - 1, count, dtype=torch.float64)
    left = place.long().clamp_max(len(anchors) - 2)
    mixed = anchors[left] + (place - left)[:, None] * (anchors[left + 1] - anchors[left])
    return [(int(red), int(green), int(blue)) for red, green, blue in mixed.round().tolist()]


def palette_png(values: Tensor, low: float, high: float) -> bytes:
    """One of 256 colours per value (rows, columns), dark at `low`, bright at `high`."""
    return png(values, low, high, palette(256))
