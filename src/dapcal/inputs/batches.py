"""Batches of whatever holds data: a loader, a data set (padded or not), tensors in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

BATCH = 1024  # items of a data set at a time


def batches_of(data: Any) -> Iterator[Any]:
    """All batches of a loader or data set, or the data themselves where they are in memory.

    Items of a data set that do not stack, because their lengths differ, come one by one, each as a batch of its own.
    """
    if not is_lazy(data):
        yield data
        return
    with torch.random.fork_rng(devices=[]):  # a loader without a generator draws a seed from the global one
        if isinstance(data, DataLoader):
            yield from data
            return
        items = _items(data)
        while some := list(islice(items, BATCH)):
            try:
                yield default_collate(some)
            except (RuntimeError, TypeError):  # lengths differ
                yield from (default_collate([item]) for item in some)


def first_batch(data: Any) -> Any:
    """One batch, or one item of it as a batch; a loader stays as it is: its generator and workers are not asked."""
    if not is_lazy(data):
        return data
    with torch.random.fork_rng(devices=[]):
        if not isinstance(data, DataLoader):
            item = next(_items(data), None)
            return None if item is None else default_collate([item])
        dataset = data.dataset
        if data.batch_size is not None and not isinstance(dataset, IterableDataset) and data.batch_sampler is not None:
            return data.collate_fn([dataset[0]]) if len(dataset) else None  # type: ignore[arg-type]
        return next(iter(data), None)


def is_lazy(data: Any) -> bool:
    """Whether data are read item by item or batch by batch, rather than held as tensors."""
    if isinstance(data, DataLoader | IterableDataset):
        return True
    if isinstance(data, list) and data and all(isinstance(item, Mapping) for item in data):
        return True
    held = isinstance(data, Tensor | Mapping | tuple | list | str) or hasattr(data, "__array__")
    return not held and hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _items(data: Any) -> Iterator[Any]:
    """Of a data set, or a list of dicts; lists of numbers in them as tensors."""
    items = iter(data) if isinstance(data, IterableDataset) else (data[i] for i in range(len(data)))
    yield from map(_as_tensors, items)


def _as_tensors(item: Any) -> Any:
    """An item whose lists of numbers are tensors."""
    if isinstance(item, Mapping):
        return {key: _as_tensors(value) for key, value in item.items()}
    if isinstance(item, tuple):
        return tuple(_as_tensors(value) for value in item)
    if isinstance(item, list):
        try:
            return torch.as_tensor(item)
        except (TypeError, ValueError, RuntimeError):
            return [_as_tensors(value) for value in item]
    return item
