"""Tensors as bytes in blocks: the checksum of each, and what the numbers in it may be."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 1 << 22  # bytes under one checksum


class Damaged(ValueError):
    """A file that is not what it should be; in words that complete a sentence."""


class Changed(Damaged):
    """A file whose checksum does not match."""


def blocks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a contiguous tensor, in memory, a block at a time."""
    if tensor.numel():
        whole = tensor.reshape(-1).view(torch.uint8).numpy().data
        yield from (whole[start : start + BLOCK] for start in range(0, len(whole), BLOCK))


def checksum(block: memoryview) -> str:
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(block).hexdigest()


def checksums(tensor: Tensor) -> list[str]:
    """Of all blocks, in their order."""
    return [checksum(block) for block in blocks(tensor)]


def check_truth(tensor: Tensor) -> None:
    """Raise `Damaged` where a truth value is another byte than 0 or 1, which torch takes for granted."""
    if tensor.dtype == torch.bool and not (tensor.view(torch.uint8) <= 1).all():
        raise Damaged("it holds a truth value that is neither 0 nor 1")


def all_finite(tensor: Tensor) -> bool:
    """Whether no number is NaN or inf."""
    # a sum shows either and needs no memory, but it may overflow
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
