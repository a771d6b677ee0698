"""Trees as another library has them, laid out level by level in one list: how a `Forest` is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dapcal.networks.forests import Forest, Link
from dapcal.networks.trees import at_most


class Tree(NamedTuple):
    """A tree as it is found."""

    feature: np.ndarray  # (m,)
    threshold: np.ndarray  # (m,)
    left: np.ndarray  # places of children, (m,); below 1 at a leaf
    right: np.ndarray
    missing_right: np.ndarray  # (m,)
    value: np.ndarray  # (m, 1 or C)
    output: int = 0  # that its one value is added to


class Draw(NamedTuple):
    """A sum of trees, and of what they are added to (C,)."""

    trees: list[Tree]
    start: np.ndarray
    link: Link


def forest(draws: Sequence[Draw], dtype: torch.dtype) -> Forest:
    """Draws in one list of nodes; a row of type `dtype` goes where scikit-learn sends it."""
    trees = [(place, tree) for place, draw in enumerate(draws) for tree in draw.trees]
    laid = [_laid(tree) for _, tree in trees]
    first = np.concatenate([[0], np.cumsum([len(one.child) for one in laid])])
    threshold = np.concatenate([one.threshold for one in laid])
    most = torch.finfo(dtype).max  # of a node that tells missing values from all others
    return Forest(
        feature=_whole([one.feature for one in laid]),
        threshold=at_most(torch.from_numpy(np.clip(threshold, -most, most)), dtype),
        child=_whole([np.where(one.child > 0, one.child + at, 0) for one, at in zip(laid, first, strict=False)]),
        missing_right=torch.from_numpy(np.concatenate([one.missing_right for one in laid])),
        value=torch.from_numpy(np.concatenate([one.value for one in laid])),
        root=_whole([first[:-1]]),
        draw=_whole([np.array([place for place, _ in trees])]),
        output=_whole([np.array([tree.output for _, tree in trees])]),
        start=torch.from_numpy(np.stack([draw.start for draw in draws])),
    )


class _Laid(NamedTuple):
    """A tree level by level."""

    feature: np.ndarray
    threshold: np.ndarray
    child: np.ndarray
    missing_right: np.ndarray
    value: np.ndarray  # of the leaves


def _laid(tree: Tree) -> _Laid:
    levels, children, level, count = [], [], np.zeros(1, np.int64), 1
    while len(level):
        inner = tree.left[level] > 0
        below = np.stack([tree.left[level[inner]], tree.right[level[inner]]], 1).ravel()
        child = np.zeros(len(level), np.int64)
        child[inner] = count + 2 * np.arange(len(below) // 2)
        levels.append(level)
        children.append(child)
        level, count = below.astype(np.int64), count + len(below)
    order, child = np.concatenate(levels), np.concatenate(children)
    inner = child > 0
    return _Laid(
        np.where(inner, tree.feature[order], 0),
        np.where(inner, tree.threshold[order], 0.0),
        child,
        inner & tree.missing_right[order],
        tree.value[order[~inner]],
    )


def _whole(parts: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int32))
