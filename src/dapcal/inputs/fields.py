"""Several named tensors as one: a batch of fields packed side by side into (N, D), and unpacked again.

Everything behind the door works on one tensor of inputs. Where a network takes several (token ids and their mask, an
image and a table), or one whose length differs between batches, they are packed at the door and unpacked when the
network runs. Nothing is lost: whole numbers come back as they were.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dapcal.storing import Stores

LARGEST = 2**53  # whole numbers up to here are exact in float64
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Field:
    """One of the tensors that a network takes.

    Attributes:
        name: of the keyword, or of the place.
        shape: of one input; where its length varies, of one place.
        dtype: as torch calls it, e.g. "int64".
        varies: whether its first dimension, the length, may differ between batches.
        pad: what fills places that an input does not have.
    """

    stores = Stores()

    name: str
    shape: tuple[int, ...]
    dtype: str
    varies: bool = False
    pad: int = 0

    @property
    def size(self) -> int:
        """Numbers of one input, or of one place."""
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its type in torch."""
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found


@dataclass(frozen=True)
class Fields:
    """How the tensors that a network takes lie side by side in one, (N, D).

    Those of variable length have one length in a batch, so D says what it is.

    Attributes:
        fields: in their order.
        call: how the network is called: by "keywords", by "positions", or with one "mapping".
        left: whether shorter inputs are padded on the left.
    """

    stores = Stores()

    fields: tuple[Field, ...]
    call: str
    left: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Of the fields."""
        return tuple(field.name for field in self.fields)

    @property
    def varies(self) -> bool:
        """Whether lengths may differ between batches."""
        return any(field.varies for field in self.fields)

    @property
    def dtype(self) -> torch.dtype:
        """Of the packed tensor: whole numbers, if all are; else one that holds every number of all fields exactly."""
        dtypes = {field.torch_dtype for field in self.fields}
        if not any(dtype.is_floating_point for dtype in dtypes):
            return torch.int64
        wide = dtypes & {torch.float64, torch.int64, torch.int32, torch.uint16, torch.uint32}
        return torch.float64 if wide else torch.float32

    def pack(self, inputs: Mapping[str, Tensor], name: str, length: int = 0) -> Tensor:
        """One tensor (N, D); `name` is what errors call the inputs, `length` the least number of places."""
        missing = [own for own in self.names if own not in inputs]
        if missing:
            raise ValueError(
                f"Expected `{name}` with {list(self.names)} as in training, got {list(inputs)}; add {missing}"
            )
        parts = {field.name: _checked(field, inputs[field.name], name) for field in self.fields}
        counts = {len(part) for part in parts.values()}
        if len(counts) > 1:
            raise ValueError(f"Expected as many rows of every input in `{name}`, got {sorted(counts)}")
        if counts == {0}:
            raise ValueError(f"Expected at least one input in `{name}`, got none")
        return self.side_by_side(parts, max(length, self.places(parts)))

    def side_by_side(self, parts: Mapping[str, Tensor], length: int) -> Tensor:
        """The packed tensor of fields that are known to be right, by operations that look at no value."""
        padded = [self._padded(field, parts[field.name], length) for field in self.fields]
        return torch.cat([part.flatten(1).to(self.dtype) for part in padded], 1)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        """The tensors by name, as they were."""
        n, length = packed.shape[0], self.length(packed)
        parts = packed.split([field.size * (length if field.varies else 1) for field in self.fields], 1)
        return {
            field.name: part.reshape((n, length, *field.shape) if field.varies else (n, *field.shape)).to(
                field.torch_dtype
            )
            for field, part in zip(self.fields, parts, strict=True)
        }

    def places(self, inputs: Mapping[str, Tensor]) -> int:
        """The greatest length of the fields of variable length in a batch; 0 where there are none."""
        return max((inputs[field.name].shape[1] for field in self.fields if field.varies), default=0)

    def length(self, packed: Tensor) -> int:
        """Places of the fields of variable length; 0 where there are none."""
        fixed = sum(field.size for field in self.fields if not field.varies)
        return (packed.shape[1] - fixed) // self._each if self.varies else 0

    def holds(self, x: Any) -> bool:
        """Whether a tensor may be inputs that are packed already."""
        if not isinstance(x, Tensor) or x.ndim != 2 or x.dtype != self.dtype:
            return False
        rest = x.shape[1] - sum(field.size for field in self.fields if not field.varies)
        return rest == 0 if not self.varies else rest > 0 and rest % self._each == 0

    @property
    def _each(self) -> int:
        return sum(field.size for field in self.fields if field.varies)

    def _padded(self, field: Field, part: Tensor, length: int) -> Tensor:
        short = length - part.shape[1] if field.varies else 0
        if not short:
            return part[:, None] if part.ndim == 1 else part
        filling = torch.full((len(part), short, *field.shape), field.pad, dtype=part.dtype, device=part.device)
        return torch.cat([filling, part] if self.left else [part, filling], 1)


def _checked(field: Field, part: Tensor, name: str) -> Tensor:
    """A tensor of the field's shape and type; whole numbers of another width, and half precision, are converted."""
    what = f"`{name}` with `{field.name}`"
    part = part.float() if part.dtype in _HALF else part
    shape = tuple(part.shape[2:] if field.varies else part.shape[1:])
    if shape != field.shape or part.ndim < 1 + field.varies:
        wanted = ("length", *field.shape) if field.varies else field.shape
        raise ValueError(
            f"Expected {what} of shape (N, {', '.join(map(str, wanted))}) as in training, got {tuple(part.shape)}"
        )
    floating = field.torch_dtype.is_floating_point
    if part.is_floating_point() != floating or (floating and part.dtype != field.torch_dtype):
        raise ValueError(f"Expected {what} of {field.torch_dtype} as in training, got {part.dtype}; convert it")
    if floating and not part.isfinite().all():
        raise ValueError(f"Expected finite numbers in {what}, got NaN or inf; drop or impute those rows")
    if not floating and part.numel() and part.dtype == torch.int64 and int(part.abs().max()) > LARGEST:
        raise ValueError(f"Expected whole numbers up to 2⁵³ in {what}, got larger ones; number them anew")
    return part.to(field.torch_dtype)
