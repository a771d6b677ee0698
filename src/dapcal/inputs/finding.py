"""Which fields data have: names, shapes and types of all batches, what varies in length, and what pads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dapcal.inputs.fields import Field, Fields
from dapcal.inputs.reading import Parts

_HALF = (torch.float16, torch.bfloat16)


def find_fields(batches: Iterable[Parts], name: str, pad_id: int | None = None) -> Fields:
    """Fields that hold every batch.

    Args:
        batches: all of them.
        name: what errors call the data.
        pad_id: what pads token ids, where the network says it; else what stands in masked places, or 0.
    """
    found: dict[str, _Seen] = {}
    call, left = "", False
    for parts in batches:
        if call and (parts.call != call or parts.inputs.keys() != found.keys()):
            raise TypeError(
                f"Expected batches of one kind in `{name}`, got {list(found)} by {call} and {list(parts.inputs)} by "
                f"{parts.call}"
            )
        call = parts.call
        mask = mask_of(parts.inputs)
        left = left or (mask is not None and bool((parts.inputs[mask][:, 0] == 0).any()))
        for key, part in parts.inputs.items():
            found.setdefault(key, _Seen()).add(part, None if mask in (None, key) else parts.inputs[mask])
    if not found:
        raise ValueError(f"Expected at least one input in `{name}`, got none")
    masked = {shape[0] for key, seen in found.items() if _is_mask(key) for shape in seen.shapes}
    fields = tuple(seen.field(key, name, masked, pad_id) for key, seen in found.items())
    return Fields(fields, call, left)


class _Seen:
    """What the batches of one field have shown."""

    def __init__(self) -> None:
        self.shapes: set[tuple[int, ...]] = set()  # of one input
        self.dtypes: set[torch.dtype] = set()
        self.masked: set[int] = set()  # values in masked places

    def add(self, part: Tensor, mask: Tensor | None) -> None:
        self.shapes.add(tuple(part.shape[1:]))
        self.dtypes.add(torch.float32 if part.dtype in _HALF else part.dtype)
        if mask is not None and mask.shape == part.shape and not part.is_floating_point() and len(self.masked) < 2:
            self.masked |= {int(value) for value in part[mask == 0].unique()[:2]}

    def field(self, key: str, name: str, masked: set[int], pad_id: int | None) -> Field:
        """The field; `masked` are the lengths of the mask, with which it varies."""
        shapes = sorted(self.shapes)
        varies = len(shapes) > 1 or bool(shapes[0] and len(masked) > 0 and shapes[0][0] in masked)
        if varies and len({shape[1:] if shape else (0,) for shape in shapes}) > 1:
            raise ValueError(
                f"Expected `{key}` in `{name}` of one shape but for its length, the first dimension of an input, got "
                f"{shapes[0]} and {shapes[-1]}; resize or pad them to one shape"
            )
        if len({dtype.is_floating_point for dtype in self.dtypes}) > 1:
            raise ValueError(f"Expected `{key}` in `{name}` of one type, got {sorted(map(str, self.dtypes))}")
        dtype = self.dtypes.pop()
        for other in self.dtypes:
            dtype = torch.promote_types(dtype, other)
        shape = shapes[0][1:] if varies else shapes[0]
        pad = 0 if dtype.is_floating_point else self._pad(key, pad_id)
        return Field(key, shape, str(dtype).removeprefix("torch."), varies, pad if varies else 0)

    def _pad(self, key: str, pad_id: int | None) -> int:
        if _is_mask(key):
            return int("padding_mask" in key)  # torch marks what is to be ignored
        if "token_type" in key or "position" in key:
            return 0
        if pad_id is not None:
            return pad_id
        return next(iter(self.masked)) if len(self.masked) == 1 else 0


def mask_of(inputs: Mapping[str, Tensor]) -> str | None:
    """The name of the mask whose zeros are places to be ignored, (N, length)."""
    return next((n for n, t in inputs.items() if _is_mask(n) and "padding_mask" not in n and t.ndim == 2), None)


def _is_mask(name: str) -> bool:
    return "mask" in name
