"""Edges of the bins that a number falls into: where its quantiles are, or where a tree would split it.

Of a skewed number with many equal values most quantiles are one and the same; a tree that predicts the target from that
number alone splits where it matters.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

MOST_ROWS = 20_000  # that a tree looks at
MOST_CLASSES = 10  # of which a tree sees the shares, the most frequent ones
FEWEST_IN_BIN = 8  # rows of a tree's bin, at least


def are_numbers(x: Tensor) -> Tensor:
    """Inputs with three different values or more, as places (F,)."""
    low, high = x.min(0).values, x.max(0).values
    return ((x != low) & (x != high)).any(0).nonzero().flatten()


def quantile_edges(x: Tensor, bins: int) -> list[Tensor]:
    """Different values among bins + 1 quantiles of every column of x (N, F)."""
    shares = np.linspace(0, 1, bins + 1)
    return [_edges(np.quantile(column, shares)) for column in x.double().cpu().numpy().T]


def tree_edges(x: Tensor, y: Tensor, bins: int) -> list[Tensor]:
    """The ends of every column of x (N, F), and where a tree of that column alone splits; where it splits less than
    twice, quantiles beside that.

    Args:
        x: inputs.
        y: targets: classes (N,), or numbers (N, K).
        bins: leaves of a tree, at most.
    """
    x, y = x[:MOST_ROWS].double().cpu(), y[:MOST_ROWS].cpu()
    targets = (_shares(y) if not y.is_floating_point() else y.double()).numpy()  # (N, K)
    return [_of_column(column, targets.reshape(len(targets), -1), bins) for column in x.numpy().T]


EDGES: dict[str, Callable[[Tensor, Tensor, int], list[Tensor]]] = {
    "quantiles": lambda x, y, bins: quantile_edges(x, bins),  # noqa: ARG005
    "tree": tree_edges,
}
"""By the name that a recipe has for them."""


def _of_column(column: np.ndarray, targets: np.ndarray, bins: int) -> Tensor:
    found = splits(column, targets, bins, FEWEST_IN_BIN)
    ends = [column.min(), column.max()]
    if len(found) < 2 and len(found) + 1 < bins:
        ends = np.quantile(column, np.linspace(0, 1, bins - len(found) + 1)).tolist()
    return _edges(np.array([*ends, *found]))


def splits(column: np.ndarray, targets: np.ndarray, leaves: int, fewest: int) -> list[float]:
    """Where a tree of one column splits it, best gain first: the sum of squares within leaves falls the most.

    Args:
        column: (N,).
        targets: (N, K).
        leaves: at most.
        fewest: rows of a leaf.
    """
    order = np.argsort(column, kind="stable")
    x, sums = column[order], np.concatenate([np.zeros((1, targets.shape[1])), targets[order].cumsum(0)])  # (N + 1, K)

    def best(first: int, end: int) -> tuple[float, int] | None:
        """The gain and place of the best split of rows first to end."""
        places = np.arange(first + fewest, end - fewest + 1)
        places = places[x[places - 1] < x[places]] if len(places) else places
        if not len(places):
            return None
        left, right = sums[places] - sums[first], sums[end] - sums[places]
        gain = (left**2).sum(1) / (places - first) + (right**2).sum(1) / (end - places)
        gain -= ((sums[end] - sums[first]) ** 2).sum() / (end - first)
        place = int(gain.argmax())
        return float(gain[place]), int(places[place])

    heap: list[tuple[float, int, int, int]] = []

    def offer(first: int, end: int) -> None:
        found = best(first, end)
        if found is not None and found[0] > 1e-12:
            heapq.heappush(heap, (-found[0], first, found[1], end))

    offer(0, len(x))
    thresholds: list[float] = []
    while heap and len(thresholds) < leaves - 1:
        _, first, place, end = heapq.heappop(heap)
        thresholds.append(float((x[place - 1] + x[place]) / 2))
        offer(first, place)
        offer(place, end)
    return thresholds


def _shares(y: Tensor) -> Tensor:
    """A 0/1 column for each of the most frequent classes, (N, K)."""
    frequent = y.bincount().argsort(descending=True)[:MOST_CLASSES]
    return (y[:, None] == frequent).double()


def _edges(values: np.ndarray) -> Tensor:
    """Ascending and different, also as float32, in which rows are."""
    return torch.from_numpy(values).float().unique()
