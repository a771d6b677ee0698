"""Whole-number inputs (token ids) against the embedding that they go into."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor, nn

from dapcal.networks import entering


def check_tokens(network: nn.Module | None, x: Tensor, name: str) -> None:
    """Refuse ids that an embedding of the network does not have; on a GPU the network itself could not say it."""
    if x.is_floating_point() or network is None or not len(x):
        return
    known = vocabulary(network, x[:1])
    if known is None:
        return
    outside = ((x < 0) | (x >= known)).flatten(1).any(1)
    if outside.any():
        row = int(outside.nonzero()[0])
        ids = x[row].flatten()
        first = int(ids[(ids < 0) | (ids >= known)][0])
        raise ValueError(
            f"Expected token ids from 0 to {known - 1} in `{name}`, which the network has embeddings for, got {first} "
            f"in row {row}; prepare the inputs as in training"
        )


def vocabulary(network: nn.Module, like: Tensor) -> int | None:
    """How many ids the embedding knows that inputs go into as they are; None where there is none."""
    embeddings = {name: module for name, module in network.named_modules() if isinstance(module, nn.Embedding)}
    device = next((parameter.device for parameter in network.parameters()), like.device)
    x = torch.zeros_like(like, device=device)
    known: list[int] = []

    def tell(name: str, entered: Tensor) -> None:
        if isinstance(entered, Tensor) and entered.data_ptr() == x.data_ptr() and entered.shape == x.shape:
            known.append(embeddings[name].num_embeddings)

    if embeddings:
        with torch.no_grad(), entering(embeddings, tell), suppress(Exception):  # told by who runs it on real inputs
            network(x)
    return min(known, default=None)
