"""Trees of any depth as arrays: forests and boosting models of others, draw by draw, without their code.

The nodes of all trees stand in one list. The children of a node stand behind it, the right one next to the left: so
every walk down ends. A draw is the sum of its trees and of what they are added to.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from dapcal.storing import Stores

Link = Literal["numbers", "probabilities", "logits"]
"""What the sums of trees are."""

_STEP = 2**17  # numbers of leaves that are looked up at once


@dataclass(frozen=True, eq=False)
class Forest:
    """S draws, each a sum of trees: T trees with M nodes in all, of which L are leaves.

    Attributes:
        feature: the input that a node looks at, (M,) int32.
        threshold: rows up to it go left, (M,).
        child: the left child of a node, before the right one, (M,) int32; 0 for a leaf.
        missing_right: whether rows without a value go right, (M,).
        value: of the leaves, in the order of the nodes: all outputs of a draw (L, C), or the one of the tree (L, 1).
        root: of every tree, (T,) int32.
        draw: that a tree belongs to, (T,) int32.
        output: that a tree with one value adds to, (T,) int32.
        start: what the trees of a draw are added to, (S, C).
    """

    stores = Stores()

    feature: Tensor
    threshold: Tensor
    child: Tensor
    missing_right: Tensor
    value: Tensor
    root: Tensor
    draw: Tensor
    output: Tensor
    start: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Sums of all draws at rows (N, P), (S, N, C), in the precision of the leaves."""
        width = max(1, len(self.root) * self.value.shape[1])
        parts = [self._sums(part) for part in x.to(self.threshold.dtype).split(max(1, _STEP // width))]
        return torch.cat(parts).movedim(1, 0) if parts else self.start[:, None].expand(-1, 0, -1)

    def leaves(self, x: Tensor) -> Tensor:
        """The leaf of every tree that a row ends in, as a place in `value`, (N, T)."""
        rows, trees = len(x), len(self.root)
        place = self.root.long().repeat(rows)  # of the node where a row is, row by row
        row = torch.arange(rows, device=x.device).repeat_interleave(trees) * x.shape[1]
        values = x.flatten()
        walking = torch.arange(len(place), device=x.device)
        while len(walking):
            child = self.child[place[walking]]
            inner = child > 0
            walking, child = walking[inner], child[inner]
            node = place[walking]
            value = values[row[walking] + self.feature[node]]
            right = (value > self.threshold[node]) | (value.isnan() & self.missing_right[node])
            place[walking] = child + right.long()
        return self._leaf[place].reshape(rows, trees)

    @cached_property
    def _leaf(self) -> Tensor:
        """Places of leaves in `value`, (M,)."""
        return (self.child == 0).cumsum(0) - 1

    def _sums(self, x: Tensor) -> Tensor:
        """(N, S, C)."""
        draws, outputs = self.start.shape
        found = self.value[self.leaves(x)]  # (N, T, 1 or C)
        if found.shape[-1] == outputs:
            return self.start.expand(len(x), -1, -1).index_add(1, self.draw.long(), found)
        place = self.draw.long() * outputs + self.output
        flat = self.start.flatten().expand(len(x), -1).index_add(1, place, found[..., 0])
        return flat.reshape(len(x), draws, outputs)

    def check(self) -> None:
        """Refuse arrays that do not go together, as a file may hold them: sizes, places that are out of range, cycles.

        Whether rows have as many inputs as nodes look at is to be asked beside it.
        """
        nodes, trees = len(self.feature), len(self.root)
        whole = (self.feature, self.child, self.root, self.draw, self.output)
        fine = all(part.dtype == torch.int32 and part.ndim == 1 for part in whole) and nodes > 0 and trees > 0
        fine = fine and self.start.ndim == self.value.ndim == 2 and self.start.numel() > 0
        fine = fine and all(part.is_floating_point() for part in (self.threshold, self.value, self.start))
        fine = fine and self.value.dtype == self.start.dtype and self.missing_right.dtype == torch.bool
        fine = fine and all(part.shape == (nodes,) for part in (self.threshold, self.child, self.missing_right))
        fine = fine and all(part.shape == (trees,) for part in (self.draw, self.output))
        if not fine:
            raise ValueError("its trees have arrays of sizes or types that do not go together")
        draws, outputs = self.start.shape
        child, place = self.child, torch.arange(nodes, device=self.child.device)
        if not bool(((child == 0) | ((child > place) & (child < nodes - 1))).all()):
            raise ValueError("its trees have a node whose children do not stand behind it")
        if len(self.value) != int((child == 0).sum()) or self.value.shape[1] not in (1, outputs):
            raise ValueError("its trees have another number of leaves than values of them")
        for part, most in ((self.root, nodes), (self.draw, draws), (self.output, outputs), (self.feature, 2**31)):
            if not 0 <= int(part.min()) <= int(part.max()) < most:
                raise ValueError("its trees have a place that is out of range")
