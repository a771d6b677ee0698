"""Leaves of boosted trees found without walking down: of the leaves that a row may still end in, the first.

A tree's leaves are bits, from left to right. Where a row goes right at a node, the leaves left of it are out: so of
every input and every place between its thresholds it is known beforehand which leaves of which trees remain, and a row
looks up one line for each of its inputs. The lowest bit of their conjunction is the leaf (QuickScorer: Lucchese,
Nardini, Orlando, Perego, Tonellotto, Venturini 2015, https://doi.org/10.1145/2766462.2767733). It is the leaf that a
walk ends in, found by operations on whole lines in place of one look-up for every step down every tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MOST_LEAVES = 32  # of a tree: the bits of a number; scikit-learn's have 31 at most
_FEW = 256  # lines that are looked up at once: those of some rows
_GROUP = 256  # trees whose lines are kept together: few enough for lines to stay close to a core
_DE_BRUIJN = np.uint32(
    0x077CB531
)  # times a power of two has its exponent, spelt by another code, in the upper five bits
_SHIFT = np.uint32(27)


@dataclass(frozen=True, eq=False)
class Group:
    """Some trees.

    Attributes:
        places: of the inputs that they look at among those that any tree does, (F,).
        first: where the part of each of these inputs begins in `line`, (F, 1).
        line: of `remaining`, by the number of thresholds of all trees below a value, input after input.
        remaining: what remains of the trees by one of their inputs, leaves as bits, (lines, trees).
        value: of their leaves, by the code of their bit, (trees · 32,).
    """

    places: np.ndarray
    first: np.ndarray
    line: np.ndarray
    remaining: np.ndarray
    value: np.ndarray

    def __call__(self, below: np.ndarray) -> np.ndarray:
        """Values of the leaves, (n, trees), of n rows by the number of thresholds below their inputs, (inputs, n)."""
        trees = self.remaining.shape[1]
        leaves = self._leaves(below) if len(self.places) else np.full((below.shape[1], trees), 1, np.uint32)
        # `clip`, as none is out of range: `raise` would make a copy first
        return self.value.take(_codes(leaves) + np.arange(trees) * MOST_LEAVES, mode="clip")

    def _leaves(self, below: np.ndarray) -> np.ndarray:
        """Leaves that all inputs leave, as bits, (n, trees)."""
        lines = self.line.take(below[self.places] + self.first, mode="clip")  # (F, n)
        if lines.size <= _FEW:
            return np.bitwise_and.reduce(self.remaining.take(lines, 0, mode="clip"), 0)
        leaves = self.remaining.take(lines[0], 0, mode="clip")
        own = np.empty_like(leaves)
        for line in lines[1:]:
            self.remaining.take(line, 0, out=own, mode="clip")
            np.bitwise_and(leaves, own, out=leaves)
        return leaves


@dataclass(frozen=True, eq=False)
class Masks:
    """All trees, group by group; a row's place between thresholds is looked up once for all of them.

    Attributes:
        features: inputs that any tree looks at.
        thresholds: of all trees, ascending, by input.
        groups: of trees, in their order.
    """

    features: tuple[int, ...]
    thresholds: tuple[np.ndarray, ...]
    groups: tuple[Group, ...]

    def below(self, x: np.ndarray) -> np.ndarray:
        """How many thresholds lie below each input of rows (N, P) that is looked at, (inputs, N)."""
        found = np.empty((len(self.features), len(x)), np.int64)
        for own, feature, thresholds in zip(found, self.features, self.thresholds, strict=True):
            own[:] = thresholds.searchsorted(x[:, feature])
        return found

    def leaves(self, below: np.ndarray, rows: slice) -> np.ndarray:
        """Values of the leaves of some rows, (n, trees), from `below` all of them."""
        return np.concatenate([group(below[:, rows]) for group in self.groups], 1)


def masks(feature: np.ndarray, threshold: np.ndarray, value: np.ndarray) -> Masks | None:
    """Trees (T, 2^D − 1), (T, 2^D − 1), (T, 2^D) as bits; None where walking down is as fast or leaves are too many.

    Args:
        feature: as in `dapcal.networks.trees.Trees`, tree by tree.
        threshold: likewise; the largest number where a tree has ended.
        value: of the leaves.
    """
    if feature.min(initial=0) < 0:
        return None  # which a walk refuses
    ends = threshold == np.finfo(threshold.dtype).max
    reached = _reached(ends)
    if reached.sum(1).max(initial=0) > MOST_LEAVES or not _pays(feature, ends):
        return None
    features = tuple(map(int, np.unique(feature[~ends])))
    thresholds = tuple(np.unique(threshold[~ends & (feature == one)]) for one in features)
    parts = [slice(start, start + _GROUP) for start in range(0, len(feature), _GROUP)]
    every = dict(zip(features, thresholds, strict=True))
    found = [_group(feature[one], threshold[one], value[one], ends[one], reached[one], every) for one in parts]
    return Masks(features, thresholds, tuple(found))


def _pays(feature: np.ndarray, ends: np.ndarray) -> bool:
    """A line of an input costs a third of a nanosecond a tree and 45 to be found, a walk 60 a tree (measured)."""
    trees = min(len(feature), _GROUP)
    inputs = len(np.unique(feature[~ends]))
    return inputs * (trees + 132) < 176 * trees


def _reached(ends: np.ndarray) -> np.ndarray:
    """Leaves that rows can end in, (T, 2^D): where a tree has ended all go left."""
    reached = np.ones((len(ends), 1), bool)
    for level in _levels(ends):
        reached = np.stack([reached, reached & ~level], -1).reshape(len(ends), -1)
    return reached


def _levels(nodes: np.ndarray) -> list[np.ndarray]:
    """Nodes (T, 2^D − 1) level by level."""
    depth = (nodes.shape[1] + 1).bit_length() - 1
    return [nodes[:, 2**level - 1 : 2 ** (level + 1) - 1] for level in range(depth)]


def _group(
    feature: np.ndarray,
    threshold: np.ndarray,
    value: np.ndarray,
    ends: np.ndarray,
    reached: np.ndarray,
    every: dict[int, np.ndarray],
) -> Group:
    bits = np.where(
        reached, np.uint32(1) << (reached.cumsum(1) - 1).clip(0).astype(np.uint32), np.uint32(0)
    )  # (T, 2^D)
    right = ~_left_of(bits)  # what remains of a tree where a row goes right at a node, (T, 2^D − 1)
    places, ranks, remaining, count = [], [], [np.empty((0, len(feature)), np.uint32)], 0
    for place, (name, all_thresholds) in enumerate(every.items()):
        trees, nodes = np.nonzero(~ends & (feature == name))
        if not len(trees):
            continue
        thresholds, line = np.unique(threshold[trees, nodes], return_inverse=True)
        own = np.full((len(thresholds) + 1, len(feature)), ~np.uint32(0))
        np.bitwise_and.at(own, (line + 1, trees), right[trees, nodes])
        rank = np.searchsorted(thresholds, [*all_thresholds, np.inf])  # of a value with so many of all below it
        places.append(place)
        ranks.append(count + rank)
        remaining.append(np.bitwise_and.accumulate(own, 0))
        count += len(own)
    by_code = np.zeros((len(feature), MOST_LEAVES), value.dtype)
    trees, leaves = np.nonzero(reached)
    by_code[trees, _codes(bits[trees, leaves])] = value[trees, leaves]
    first = np.cumsum([0, *map(len, ranks)])[: len(ranks), None]
    lines = np.concatenate(ranks or [np.empty(0, np.int64)])
    return Group(np.array(places, np.int64), first, lines, np.concatenate(remaining), by_code.ravel())


def _left_of(bits: np.ndarray) -> np.ndarray:
    """The leaves below the left child of every node, (T, 2^D − 1), from those of the leaves, (T, 2^D)."""
    levels, below = [], bits
    while below.shape[1] > 1:
        left, right = below[:, ::2], below[:, 1::2]
        levels.append(left)
        below = left | right
    return np.concatenate(levels[::-1], 1)


def _codes(leaves: np.ndarray) -> np.ndarray:
    """The lowest bits of numbers, each by its code from 0 to 31."""
    return ((leaves & (~leaves + np.uint32(1))) * _DE_BRUIJN) >> _SHIFT
