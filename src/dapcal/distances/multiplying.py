"""Matrix products: those of float32 on a CPU by oneDNN, where torch has it, and all others by torch itself.

torch gives the first to MKL, which takes twice as long on processors that are not Intel's. The numbers differ in their
last bits, which nobody relies on: what products leave in doubt is computed directly.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_FEWEST = 64  # rows of the second matrix
_ROUNDOFF = {"none": 2**-24, "ieee": 2**-24, "tf32": 2**-11, "bf16": 2**-8}  # of float32, by torch's setting


def multiplied(one: Tensor, two: Tensor) -> Tensor:
    """one · twoᵀ (N, M) of matrices (N, P) and (M, P), without gradients."""
    with torch.no_grad():
        if one.device.type == "cpu" and one.dtype == torch.float32 and _is_worth_it(one, two) and has_onednn():
            found: Tensor = torch.ops.mkldnn._linear_pointwise(one, two, None, "none", [], "")
            return found
        return one @ two.T


def roundoff(like: Tensor) -> float:
    """By how much one rounding in such a product is off at most, relatively."""
    if like.dtype != torch.float32:
        return torch.finfo(like.dtype).eps
    backend = torch.backends.mkldnn if like.device.type == "cpu" else torch.backends.cuda
    return _ROUNDOFF[backend.matmul.fp32_precision]


def _is_worth_it(one: Tensor, two: Tensor) -> bool:
    """A few rows are multiplied before oneDNN has begun; a single column it refuses."""
    return len(two) >= _FEWEST and len(one) > 1 and one.shape[1] > 1


@cache
def has_onednn() -> bool:
    """Whether this build of torch has it, with the function that is asked of it."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
