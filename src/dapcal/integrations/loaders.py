"""A loader's data as a calibration wants them: every row once, in order, on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Subset, SubsetRandomSampler

_BATCH = 64

Pair = Callable[[Any], tuple[Any, Any]]
"""From a batch, as a loader gives it, to (inputs, targets)."""


def in_order(loader: DataLoader, pair: Pair | None = None) -> DataLoader:
    """The same data set without shuffling, and without the shard of one device alone; `pair` splits its batches.

    A sampler that draws from some rows alone says which rows were trained on, and these are read. An iterable data set
    is read as it comes.
    """
    dataset, collate = loader.dataset, loader.collate_fn
    if isinstance(loader.sampler, SubsetRandomSampler):
        dataset = Subset(dataset, sorted(loader.sampler.indices))
    iterable = isinstance(dataset, IterableDataset)
    batches_itself = loader.batch_size is None and loader.batch_sampler is None
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or _BATCH
    return DataLoader(
        dataset,
        batch_size=None if batches_itself else size,
        collate_fn=collate if pair is None else Paired(collate, pair),
        num_workers=0 if iterable else loader.num_workers,  # workers would each give all rows
    )


class Paired:
    """Collates rows and splits the batch; a class, as workers may have to pickle it."""

    def __init__(self, collate: Callable[[Any], Any], pair: Pair) -> None:
        self.collate, self.pair = collate, pair

    def __call__(self, rows: Any) -> tuple[Any, Any]:
        """Inputs and targets."""
        return self.pair(self.collate(rows))


def only(loaders: Any, name: str, option: str) -> DataLoader | None:
    """The one loader there is; None where there is none, and several are refused."""
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    if isinstance(loaders, list | tuple):
        if len(loaders) > 1:
            raise ValueError(f"Expected one {name} loader, got {len(loaders)}; say which data to take with `{option}`")
        loaders = loaders[0] if loaders else None
    if loaders is not None and not isinstance(loaders, DataLoader):
        raise TypeError(
            f"Expected the {name} loader as a DataLoader, got {type(loaders).__name__}; give the data with `{option}`"
        )
    return loaders
