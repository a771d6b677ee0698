"""Images of numbers as PNG files, by the standard library alone."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor


def image_png(image: Tensor, low: float = 0.0, high: float = 1.0) -> bytes:
    """An image of one channel or three, (1 or 3, rows, columns), black at `low`, full at `high`."""
    return png(image.movedim(0, -1), low, high)


def png(values: Tensor, low: float, high: float, palette: Sequence[tuple[int, int, int]] = ()) -> bytes:
    """Of values (rows, columns), or (rows, columns, 1 or 3 channels); 256 colours as `palette` stand for levels."""
    rows, columns = values.shape[:2]
    level = ((values.detach().double().cpu() - low) / ((high - low) or 1.0) * 255).round().clamp(0, 255).to(torch.uint8)
    lines = torch.cat(
        [torch.zeros(rows, 1, dtype=torch.uint8), level.flatten(1)], 1
    )  # each begins with its filter: none
    kind = 3 if palette else {1: 0, 3: 2}[values.shape[2]]
    colors = _chunk(b"PLTE", bytes(part for color in palette for part in color)) if palette else b""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, kind, 0, 0, 0))
    pixels = _chunk(b"IDAT", zlib.compress(lines.numpy().tobytes(), 9))
    return b"\x89PNG\r\n\x1a\n" + header + colors + pixels + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
