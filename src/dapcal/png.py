"""Images of numbers as PNG files, by the standard library alone."""

from __future__ import annotations

import struct
import zlib

import torch
from torch import Tensor

_ANCHORS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Viridis in five colours (van der Walt and Smith): even steps of lightness, told apart by the colour-blind."""


def palette_png(values: Tensor, low: float, high: float) -> bytes:
    """One of 256 colours per value (rows, columns), dark at `low`, bright at `high`."""
    colours = bytes(part for colour in palette(256) for part in colour)
    return _png(values, low, high, kind=3, further=_chunk(b"PLTE", colours))


def image_png(image: Tensor, low: float = 0.0, high: float = 1.0) -> bytes:
    """An image of one channel or three, (1 or 3, rows, columns), black at `low`, full at `high`."""
    return _png(image.movedim(0, -1), low, high, kind={1: 0, 3: 2}[len(image)], further=b"")


def palette(count: int) -> list[tuple[int, int, int]]:
    """Colours from dark to bright, evenly spaced."""
    anchors = torch.tensor(_ANCHORS, dtype=torch.float64)
    place = torch.linspace(0, len(anchors) - 1, count, dtype=torch.float64)
    left = place.long().clamp_max(len(anchors) - 2)
    mixed = anchors[left] + (place - left)[:, None] * (anchors[left + 1] - anchors[left])
    return [(int(red), int(green), int(blue)) for red, green, blue in mixed.round().tolist()]


def _png(values: Tensor, low: float, high: float, kind: int, further: bytes) -> bytes:
    """Of values (rows, columns) or (rows, columns, channels)."""
    rows, columns = values.shape[:2]
    level = ((values.detach().double().cpu() - low) / ((high - low) or 1.0) * 255).round().clamp(0, 255).to(torch.uint8)
    lines = torch.cat(
        [torch.zeros(rows, 1, dtype=torch.uint8), level.flatten(1)], 1
    )  # each begins with its filter: none
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, kind, 0, 0, 0))
    pixels = _chunk(b"IDAT", zlib.compress(lines.numpy().tobytes(), 9))
    return b"\x89PNG\r\n\x1a\n" + header + further + pixels + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
