"""Approximate indexes and coresets beside exact search: time, recall, and by how much distances change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from neighbors import clustered
from torch import Tensor

from dapcal.distances import HNSW, IVF, Coreset, ProductQuantised, Radius, TorchIndex, fit_radius
from dapcal.experiments.performance import AS_FAST, Row
from dapcal.types import NeighborIndex
from performance.turns import in_turns

__all__ = ["rows"]

EXACT = "exact search, ours"
POINTS, QUERIES, KEPT, HELD_OUT = 60_000, 10_000, 2_000, 2_000


def rows(repeats: int, small: bool) -> list[Row]:
    points, queries, kept = (size // 10 if small else size for size in (POINTS, QUERIES, KEPT))
    train, asked, held_out = (clustered(size, seed) for seed, size in enumerate((points, queries, HELD_OUT)))
    recipes: dict[str, Callable[[Tensor], NeighborIndex]] = {
        "IVF": IVF(),
        "HNSW": HNSW(),
        "product quantisation": ProductQuantised(),
        f"coreset of {kept:,}, k-center": Coreset(kept),
        f"coreset of {kept:,}, herding": Coreset(kept, "herding"),
    }
    exact = TorchIndex(train)
    indexes = {name: recipe(train) for name, recipe in recipes.items()}
    seconds = in_turns(
        {name: partial(index.query, asked) for name, index in (indexes | {EXACT: exact}).items()}, repeats
    )
    name = f"{len(asked):,} queries, {len(train):,} points × {train.shape[1]}"
    return [
        Row(
            f"{name}, {way}", "s", seconds[way], EXACT, seconds[EXACT], AS_FAST,
            note="; ".join(filter(None, [recall(index, exact, asked), changed(index, exact, held_out, asked)])),
        )
        for way, index in indexes.items()
    ]  # fmt: skip


def recall(index: NeighborIndex, exact: TorchIndex, asked: Tensor) -> str:
    """Of new queries."""
    share = float((index.query(asked)[1] == exact.query(asked)[1]).double().mean())
    return f"the nearest point is found for {100 * share:.1f} %"


def changed(index: NeighborIndex, exact: TorchIndex, held_out: Tensor, asked: Tensor) -> str:
    """What becomes of d0 of ordinary queries, and of some that lie further out; each with a radius of its own."""
    further = asked + 2 * torch.randn(asked.shape, generator=torch.Generator().manual_seed(0))
    words = []
    for title, queries in {"ordinary": asked, "with noise added": further}.items():
        ours, theirs = (radius(one, held_out)(one.query(queries)[0][:, 0]) for one in (index, exact))
        out = [100 * float((d0 > 0).double().mean()) for d0 in (theirs, ours)]
        words.append(
            f"{title}: d0 above 0 for {out[0]:.1f} % → {out[1]:.1f} %, its mean "
            f"{float(theirs.mean()):.2g} → {float(ours.mean()):.2g}"
        )
    return "; ".join(words)


def radius(index: NeighborIndex, held_out: Tensor) -> Radius:
    return fit_radius(index.query(held_out)[0][:, 0], 0.9, "made-up")
