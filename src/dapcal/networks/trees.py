"""Boosted trees as tensors: every tree is filled up to one depth, so that all rows take the same few steps down.

The nodes of a tree stand level by level: the children of node i are 2i + 1 (left) and 2i + 2 (right). A branch that
ends early goes on to the left until the last level.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dapcal.networks.tree_masks import Masks, masks
from dapcal.storing import Stores

_STEP = 2**17  # rows times trees that are looked at at once: what a core has at hand


@dataclass(frozen=True, eq=False)
class Trees:
    """A sum of trees, R rounds of one tree for each of C outputs.

    Attributes:
        feature: the input that a node looks at, (R, C, 2^D − 1).
        threshold: rows up to it go left, (R, C, 2^D − 1); all do where a tree ends early.
        value: of the leaves, (R, C, 2^D).
        start: what rounds are added to, (C,).
    """

    stores = Stores()

    feature: Tensor
    threshold: Tensor
    value: Tensor
    start: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs (N, C) at rows (N, P)."""
        return self._sum(self._parts(x))

    def by_steps(self, x: Tensor) -> Tensor:
        """The same by operations of torch alone, for programs that are made of them."""
        return self._sum(self.walked(part) for part in x.split(self._rows))

    def leaves(self, x: Tensor) -> Tensor:
        """What every tree adds, (N, R, C)."""
        return torch.cat(list(self._parts(x)))

    def walked(self, x: Tensor) -> Tensor:
        """The same by steps down."""
        rounds, outputs, nodes = self.feature.shape
        first = nodes * torch.arange(rounds * outputs, device=x.device)  # of a tree
        feature, threshold = self.feature.flatten(), self.threshold.flatten()
        place = torch.zeros(len(x), rounds * outputs, dtype=torch.long, device=x.device)  # in its tree
        for _ in range(nodes.bit_length()):
            node = place + first
            place = 2 * place + 1 + (x.gather(1, feature[node]) > threshold[node])
        leaf = place - nodes + torch.arange(rounds * outputs, device=x.device) * (nodes + 1)
        return self.value.flatten()[leaf].unflatten(1, (rounds, outputs))

    def first(self, rounds: int) -> Trees:
        """The first rounds alone."""
        return replace(
            self, feature=self.feature[:rounds], threshold=self.threshold[:rounds], value=self.value[:rounds]
        )

    @cached_property
    def _masks(self) -> Masks | None:
        """The trees' leaves as bits; None where that does not pay."""
        parts = (part.flatten(0, 1).cpu().numpy() for part in (self.feature, self.threshold, self.value))
        return masks(*parts)

    @property
    def _rows(self) -> int:
        """That are looked at at once."""
        return max(1, _STEP // max(1, self.feature[..., 0].numel()))

    def _parts(self, x: Tensor) -> Iterator[Tensor]:
        """What every tree adds, (n, R, C) some rows at a time: in main memory looked up, elsewhere by walking down."""
        if x.device.type != "cpu" or self._masks is None:
            yield from map(self.walked, x.split(self._rows))
            return
        below = self._masks.below(x.detach().numpy())
        for start in range(0, max(1, len(x)), self._rows):
            found = self._masks.leaves(below, slice(start, start + self._rows))
            yield torch.from_numpy(found).unflatten(1, self.feature.shape[:2])

    def _sum(self, leaves: Iterable[Tensor]) -> Tensor:
        """Outputs (N, C) from what trees add, (n, R, C) part by part."""
        return torch.cat([part.sum(1) for part in leaves]) + self.start


@dataclass(frozen=True, eq=False)
class Blend:
    """Outputs of networks and of trees, weighed: share · network + weight · trees.

    Attributes:
        share: of a network's outputs.
        weight: of the trees'.
        trees: with an output for each of the network's; one for two classes is their difference.
        folds: more than one: trees have an output for each fold, and every fold's share of the draws has its own.
    """

    stores = Stores()

    share: float
    weight: float
    trees: Trees
    folds: int = 1

    def __call__(self, outputs: Tensor, x: Tensor) -> Tensor:
        """Outputs (..., N, C) of networks at rows (N, P), with the trees'; of several folds (S, N, 1)."""
        return self.of(outputs, self.trees(x.to(outputs.device)))

    def of(self, outputs: Tensor, trees: Tensor) -> Tensor:
        """Outputs (..., N, C) of networks with those of the trees (N, 1 or C, or one a fold) at the same rows."""
        if self.folds > 1:
            trees = trees.mT[:, :, None].repeat_interleave(len(outputs) // self.folds, 0)  # (S, N, 1)
        return self.share * outputs + self.weight * logits(trees, outputs.shape[-1])


def logits(trees: Tensor, outputs: int) -> Tensor:
    """Outputs of trees (..., 1 or C) as those of a network with C outputs."""
    if trees.shape[-1] == outputs:
        return trees
    return torch.cat([-0.5 * trees, 0.5 * trees], -1)


def side_by_side(parts: Sequence[Trees]) -> Trees:
    """Trees of as many rounds and one depth as one, whose outputs are those of all of them."""
    joined = {name: torch.cat([getattr(part, name) for part in parts], 1) for name in ("feature", "threshold", "value")}
    return Trees(**joined, start=torch.cat([part.start for part in parts]))


def from_histograms(model: Any, depth: int, dtype: torch.dtype) -> Trees:
    """Trees of scikit-learn's HistGradientBoosting, of numbers that are never missing.

    Args:
        model: fitted, with `max_depth=depth` and no categorical features.
        depth: D.
        dtype: of the inputs; a row of this type goes where scikit-learn, which computes in double precision, sends it.
    """
    rounds = model._predictors
    shape = len(rounds), len(rounds[0]), 2**depth
    feature = np.zeros((*shape[:2], shape[2] - 1), np.int64)
    threshold = np.full(feature.shape, np.finfo(np.float64).max)
    value = np.zeros(shape)
    for at in np.ndindex(*shape[:2]):
        _fill(rounds[at[0]][at[1]].nodes, feature[at], threshold[at], value[at])
    return Trees(
        torch.from_numpy(feature),
        at_most(torch.from_numpy(threshold), dtype),
        torch.from_numpy(value).to(dtype),
        torch.from_numpy(np.asarray(model._baseline_prediction, np.float64).reshape(-1)).to(dtype),
    )


def _fill(nodes: np.ndarray, feature: np.ndarray, threshold: np.ndarray, value: np.ndarray) -> None:
    """One tree, from its root down."""
    ends = [(0, 0)]  # place of a node, and of it in the filled tree
    while ends:
        place, filled = ends.pop()
        node = nodes[place]
        if not node["is_leaf"]:
            feature[filled], threshold[filled] = node["feature_idx"], node["num_threshold"]
            ends += [(int(node["left"]), 2 * filled + 1), (int(node["right"]), 2 * filled + 2)]
            continue
        while filled < len(feature):
            filled = 2 * filled + 1
        value[filled - len(feature)] = node["value"]


def at_most(threshold: Tensor, dtype: torch.dtype) -> Tensor:
    """The greatest numbers of a type that are not above: x <= threshold for the same x of that type."""
    near = threshold.to(dtype)
    below = torch.nextafter(near, torch.full_like(near, -torch.inf))
    return torch.where(near.double() > threshold, below, near)
