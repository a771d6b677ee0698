"""Distances to candidates, computed directly, so that identical points are at exactly 0."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_CACHED = 2**19  # numbers that are compared at a time on a CPU: 2 MiB, which stay close to a core


class Pairs(NamedTuple):
    """Queries, points and their distances, (M,) each; by query, then by distance, ties by point."""

    row: Tensor
    column: Tensor
    distance: Tensor


def small_steps_pay(points: Tensor) -> bool:
    """On a CPU, whose cache they stay in; other devices want few and large ones, as each has to be sent there."""
    return points.device.type == "cpu"


def nearest_among(
    points: Tensor, queries: Tensor, among: Tensor, k: int, padded: bool = True, memory: int = 2**28
) -> tuple[Tensor, Tensor]:
    """Distances (N, k), ascending, and indices (N, k) of the nearest candidates, ties by the order of candidates.

    Args:
        points: training points (T, P).
        queries: (N, P).
        among: candidates of each query, (N, c) with c >= k; ascending, where ties go by index.
        k: neighbours.
        padded: whether some may be no indices of points; these are at distance inf.
        memory: bytes that differences may take, about.
    """
    rows = max(1, _at_a_time(points, memory) // (among.shape[1] * queries.shape[1]))
    if len(queries) <= rows:
        return _nearest(points, queries, among, k, padded)
    parts = zip(queries.split(rows), among.split(rows), strict=True)
    found = [_nearest(points, part, own, k, padded) for part, own in parts]
    return torch.cat([d for d, _ in found]), torch.cat([i for _, i in found])


def distances_of_pairs(points: Tensor, queries: Tensor, row: Tensor, column: Tensor, memory: int = 2**28) -> Tensor:
    """Distances of some queries (N, P), by `row`, to as many points (T, P), by `column`, (M,)."""
    step = max(1, _at_a_time(points, memory) // points.shape[1])
    parts = zip(row.split(step), column.split(step), strict=True)
    return torch.cat([torch.linalg.vector_norm(points[own] - queries[asked], dim=1) for asked, own in parts])


def nearest_of_pairs(row: Tensor, column: Tensor, distance: Tensor, k: int) -> Pairs:
    """Of every query the k pairs that are nearest, or all where there are fewer."""
    order = torch.arange(len(row), device=row.device)
    for key in (column, distance, row):
        order = order[key[order].argsort(stable=True)]
    row, column, distance = row[order], column[order], distance[order]
    first = torch.searchsorted(row, row)  # pair of the same query
    kept = torch.arange(len(row), device=row.device) - first < k
    return Pairs(row[kept], column[kept], distance[kept])


def _at_a_time(points: Tensor, memory: int) -> int:
    return min(_CACHED, memory // 32) if small_steps_pay(points) else memory // 32


def _nearest(points: Tensor, queries: Tensor, among: Tensor, k: int, padded: bool) -> tuple[Tensor, Tensor]:
    known = among.clamp(0, len(points) - 1) if padded else among
    exact = torch.linalg.vector_norm(points[known] - queries[:, None], dim=2)  # of a file these rows alone are read
    if padded:
        exact.masked_fill_(known != among, torch.inf)
    if among.shape[1] == 1:
        return exact, among
    if k == 1:
        distances, order = exact.min(1, keepdim=True)  # the first of equal ones
    else:
        order = exact.argsort(dim=1, stable=True)[:, :k]
        distances = exact.gather(1, order)
    return distances, among.gather(1, order)
