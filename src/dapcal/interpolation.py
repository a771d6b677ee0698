"""Piecewise Chebyshev interpolation of an expensive smooth function of one non-negative number."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

NODES = 18  # on pieces of width 1; log Z has its nearest singularity π/2 off the real line: error about 1e-14


@dataclass(frozen=True, eq=False)
class Tabulated:
    """`function` on t >= 0, evaluated once at the Chebyshev nodes of each unit interval that is asked for.

    The nodes include the interval's ends, so t = 0 is exact. An interval is evaluated directly until that has cost as
    much as its table.

    >>> table = Tabulated(lambda t: t.exp())
    >>> t = torch.linspace(0, 5, 1000, dtype=torch.float64)
    >>> bool(((table(t) - t.exp()) / t.exp()).abs().max() < 1e-13)
    True
    """

    function: Callable[[Tensor], Tensor]  # (M,) -> (M,), in float64
    _pieces: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)
    _spent: Counter[int] = field(default_factory=Counter, init=False, repr=False)

    def __call__(self, t: Tensor) -> Tensor:
        """The function at t (N,)."""
        unique, inverse = t.unique(return_inverse=True)
        values = torch.empty_like(unique)
        pieces = unique.floor().long()
        for piece in pieces.unique().tolist():
            here = pieces == piece
            self._spent[piece] += int(here.sum())
            if self._spent[piece] <= NODES:
                values[here] = self.function(unique[here])
            else:
                values[here] = self._interpolate(piece, unique[here] - piece)
        return values[inverse]

    def _interpolate(self, piece: int, u: Tensor) -> Tensor:
        nodes = chebyshev(NODES, u)
        if piece not in self._pieces:
            self._pieces[piece] = self.function(piece + nodes)
        return basis(u, nodes) @ self._pieces[piece]


def chebyshev(n: int, like: Tensor) -> Tensor:
    """n Chebyshev nodes on [0, 1], ends included."""
    angle = torch.arange(n, dtype=like.dtype, device=like.device) * (math.pi / (n - 1))
    return torch.sin(angle / 2) ** 2  # (1 − cos)/2 without cancellation; first 0, last 1


def basis(u: Tensor, nodes: Tensor) -> Tensor:
    """Values (N, n) at u (N,) of the polynomials that are 1 at one Chebyshev node and 0 at the others.

    >>> nodes = chebyshev(5, torch.zeros((), dtype=torch.float64))
    >>> u = torch.tensor([0.3, 0.5, 1.0], dtype=torch.float64)
    >>> torch.allclose(basis(u, nodes) @ nodes**4, u**4)
    True
    """
    weights = torch.ones_like(nodes)
    weights[1::2] = -1
    weights[[0, -1]] *= 0.5
    difference = u[:, None] - nodes
    hit = difference == 0
    terms = weights / torch.where(hit.any(1, keepdim=True), hit.to(u.dtype).reciprocal(), difference)
    return terms / terms.sum(1, keepdim=True)
