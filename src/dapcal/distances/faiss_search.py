"""Where faiss finds neighbours sooner than torch does, if it is installed: single queries.

Measured on a CPU: a few queries cost it least by far. Of many it takes as long as the minima over groups of
`dapcal.distances.products` at best, where there are thousands of them among wide points, and up to eight times as long
where there are tens or hundreds.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

FEW = 8  # queries whose distances are computed directly, by one thread
_MOST = 2**23  # numbers to be compared with a few queries; more are worth all threads


@cache
def library() -> ModuleType | None:
    """faiss, where it is installed (`pip install 'dapcal[fast]'`)."""
    try:
        import faiss
    except ImportError:
        return None
    return faiss


def needed(by: str) -> Any:
    """faiss, for an index that cannot do without it."""
    faiss = library()
    if faiss is None:
        raise ImportError(f"{by} needs faiss: pip install 'dapcal[fast]', or use IVF(), which does without")
    return faiss


def suits(points: Tensor) -> bool:
    """Whether faiss is there and can search these points without a copy."""
    alike = points.dtype == torch.float32 and points.device.type == "cpu" and points.is_contiguous()
    return alike and library() is not None


def is_few(points: np.ndarray, queries: Tensor) -> bool:
    """Whether faiss computes distances to these queries directly, and soonest by one thread."""
    return len(queries) <= FEW and len(queries) * points.size <= _MOST


def searched(points: np.ndarray, queries: Tensor, kept: int, threads: int) -> tuple[Tensor, Tensor]:
    """Squared distances (N, kept), ascending, and indices, as faiss rounds them.

    Args:
        points: of float32 (T, P).
        queries: like them, (N, P).
        kept: neighbours.
        threads: of this search; what faiss was told before is restored.
    """
    faiss = needed("This search")
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(threads)
    try:
        squared, indices = faiss.knn(queries.numpy(), points, kept)
    finally:
        faiss.omp_set_num_threads(before)
    return torch.from_numpy(squared), torch.from_numpy(indices)
