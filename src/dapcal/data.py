"""Inputs and targets from tensors, data sets or loaders, checked at the door."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dapcal.mapped import Rows, finite_rows, taken

Inputs = Tensor | Mapping[str, Tensor] | Sequence[Tensor]
"""A batch as a network takes it: one tensor (N, ...), several, or several by name."""

Data = tuple[Inputs, Tensor] | Mapping[str, Tensor] | Dataset | DataLoader
"""What the public functions take: (inputs, targets), a dict with targets, a Dataset or DataLoader of either."""

_NAMED = 4  # parts of a value that errors name


class Ragged(ValueError):
    """Batches of inputs that do not have one shape."""


class Labelled(NamedTuple):
    """Inputs and targets in memory, or in files that they map (`dapcal.mapped`)."""

    x: Tensor  # (N, ...)
    y: Tensor  # (N,) or (N, K)

    def subset(self, index: Tensor) -> Labelled:
        """The rows at `index`."""
        return Labelled(taken(self.x, index), taken(self.y, index))


def gather(data: Data, name: str) -> Labelled:
    """All inputs and targets as two tensors; `name` is what errors call them.

    A Dataset or DataLoader is read once; what is more than `dapcal.mapped.IN_MEMORY` goes to a file as it comes.
    """
    if isinstance(data, Labelled):
        x, y = data.x, data.y
    elif isinstance(data, tuple | list):
        if len(data) != 2 or not all(isinstance(part, Tensor) for part in data):
            raise TypeError(f"Expected `{name}` as a pair of tensors (inputs, targets), got {with_remedy(data)}")
        x, y = cast("tuple[Tensor, Tensor]", data)
    elif isinstance(data, DataLoader | Dataset):
        x, y = _joined(data, name)
    else:
        raise TypeError(f"Expected `{name}` as (inputs, targets), a Dataset or a DataLoader, got {type(data).__name__}")
    x = check_inputs(x, name)
    if y.ndim == 0 or len(x) != len(y):
        found = len(y) if y.ndim else "a single"
        raise ValueError(f"Expected as many targets as inputs in `{name}`, got {len(x)} inputs and {found} targets")
    return Labelled(x, y)


def check_inputs(x: Tensor, name: str, like: Tensor | None = None) -> Tensor:
    """A non-empty, finite batch of inputs, shaped as the training inputs `like`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"Expected `{name}` as a tensor, got {type(x).__name__}; use torch.as_tensor")
    if x.ndim < 2:
        raise ValueError(
            f"Expected `{name}` as a batch of inputs (N, ...), got shape {tuple(x.shape)}; a single column is "
            "x[:, None], a single input x[None]"
        )
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x  # networks in half precision are converted, too
    if x.shape[0] == 0:
        raise ValueError(f"Expected at least one input in `{name}`, got none")
    if x.is_floating_point():
        finite = finite_rows(x)
        if not finite.all():
            raise ValueError(
                f"Expected finite inputs in `{name}`, got NaN or inf in {int((~finite).sum())} of {len(x)} rows "
                f"(the first is row {int((~finite).nonzero()[0])}); drop or impute them"
            )
    if like is not None and x.shape[1:] != like.shape[1:]:
        raise ValueError(
            f"Expected `{name}` with inputs of shape {tuple(like.shape[1:])} as in training, got {tuple(x.shape[1:])}"
        )
    if like is not None and x.dtype != like.dtype:
        raise ValueError(
            f"Expected `{name}` of dtype {like.dtype} as in training, got {x.dtype}; convert it with .to()"
        )
    return x


def size(data: Labelled | DataLoader) -> int:
    """Number of training pairs N: of a loader those that its sampler takes, which may be part of the data set."""
    if not isinstance(data, DataLoader):
        return len(data.x)
    try:
        return len(data.dataset if isinstance(data.dataset, IterableDataset) else data.sampler)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            "Expected a DataLoader of known length, got one over an IterableDataset without `__len__`; give it one, or "
            "pass the data set itself, which is read once"
        ) from None


def in_memory(data: Data, name: str) -> Labelled | DataLoader:
    """Checked tensors, or the DataLoader itself (which may augment its inputs anew every epoch)."""
    return data if isinstance(data, DataLoader) else gather(data, name)


def batch_count(data: Labelled | DataLoader, batch_size: int) -> int:
    """Number of minibatches in an epoch."""
    n = size(data)
    return len(data) if isinstance(data, DataLoader) else len(batch_sizes(n, batch_size))


def batch_sizes(n: int, batch_size: int) -> list[int]:
    """Sizes of the minibatches of n rows; a last one of a single row joins the one before (batch norm needs two).

    >>> batch_sizes(10, 4), batch_sizes(9, 4)
    ([4, 4, 2], [4, 5])
    """
    sizes = [batch_size] * (n // batch_size) + [n % batch_size] * (n % batch_size > 0)
    if len(sizes) > 1 and sizes[-1] == 1 and batch_size > 1:
        sizes[-2:] = [sizes[-2] + 1]
    return sizes


def shuffled(data: Labelled, order: Tensor, batch_size: int, done: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Minibatches in the given order of rows, without the first `done`."""
    for index in order.split(batch_sizes(len(order), batch_size))[done:]:
        yield data.x[index], data.y[index]


def order_of(n: int, generator: torch.Generator, weights: Tensor | None = None) -> Tensor:
    """The rows of an epoch in random order, (n,); with weights (n,) row i is there n · w_i/Σw times, in the mean.

    Systematic sampling: the number of times is that share rounded up or down, so that little is left to chance.

    >>> order_of(6, torch.Generator().manual_seed(0), torch.tensor([0.0, 1, 1, 1, 1, 2])).sort().values
    tensor([1, 2, 3, 4, 5, 5])
    """
    order = torch.randperm(n, generator=generator)
    if weights is None:
        return order
    share = weights.double().cpu()[order]
    ends = (share.cumsum(0) / share.sum() * n + torch.rand(1, generator=generator, dtype=torch.float64)).floor().long()
    ends[-1] = n  # whatever rounding says
    times = torch.cat([ends[:1], ends.diff()])
    return order.repeat_interleave(times)[torch.randperm(n, generator=generator)]


def split(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two random halves of n rows."""
    order = torch.randperm(n, generator=generator)
    return order[: (n + 1) // 2], order[(n + 1) // 2 :]


def pairs_of(loader: DataLoader, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of a loader, at least one, checked; `name` is what errors call them."""
    empty = True
    for batch in loader:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise TypeError(f"Expected `{name}` to yield (inputs, targets), got {with_remedy(batch)}")
        yield check_inputs(batch[0], name), batch[1]
        empty = False
    if empty:
        raise ValueError(f"Expected at least one input in `{name}`, got none")


def inputs_of(data: Any, batch_size: int) -> Iterator[Tensor]:
    """Batches of inputs, with or without targets beside them."""
    if isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[0], Tensor):
        data = data[0]
    if isinstance(data, Tensor):
        yield from check_inputs(data, "data").split(batch_size)
        return
    if not isinstance(data, DataLoader | Dataset):
        raise TypeError(
            f"Expected `data` as inputs, (inputs, targets), a Dataset or a DataLoader, got {with_remedy(data)}"
        )
    with torch.random.fork_rng(devices=[]):  # a loader without a generator draws a seed from the global one
        for batch in data if isinstance(data, DataLoader) else DataLoader(data, batch_size=batch_size):
            yield check_inputs(batch[0] if isinstance(batch, tuple | list) else batch, "data")


def _joined(data: Dataset | DataLoader, name: str) -> tuple[Tensor, Tensor]:
    batches = data if isinstance(data, DataLoader) else DataLoader(data, batch_size=1024)
    inputs, targets = Rows(expected=_rows_in(data)), Rows()
    with torch.random.fork_rng(devices=[]):  # a loader without a generator draws a seed from the global one
        for x, y in _stacked(pairs_of(batches, name), name):
            inputs.append(x)
            targets.append(y)
    return inputs.joined, targets.joined


def _rows_in(data: Dataset | DataLoader) -> int | None:
    """How many rows there are, where data say it."""
    try:
        return size(data) if isinstance(data, DataLoader) else len(data)  # type: ignore[arg-type]
    except TypeError:
        return None


def _stacked(pairs: Iterator[tuple[Tensor, Tensor]], name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """The same batches, which must have inputs of one shape."""
    shape = None
    try:
        for x, y in pairs:
            shape = shape or x.shape[1:]
            if x.shape[1:] != shape:
                raise Ragged(
                    f"Expected inputs of one shape in `{name}`, got {tuple(shape)} and {tuple(x.shape[1:])}; pad them"
                )
            yield x, y
    except RuntimeError as error:
        if "equal size" not in str(error):  # torch's words, where items of a data set do not stack
            raise
        raise Ragged(f"Expected inputs of one shape in `{name}`, got several; pad them") from error


def describe(value: Any) -> str:
    """What a value is, in words for errors."""
    if isinstance(value, tuple | list):
        kinds = ", ".join(repr(type(part).__name__) for part in value[:_NAMED])
        named = f"{type(value).__name__} of [{kinds}"
        return f"{named}]" if len(value) <= _NAMED else f"{named}, ...] ({len(value)})"
    return f"{type(value).__name__} of {list(value)}" if isinstance(value, Mapping) else type(value).__name__


def with_remedy(value: Any) -> str:
    """The same, and what makes data of it, where that is known."""
    parts = value if isinstance(value, tuple | list) else (value,)
    if isinstance(value, list) and value and all(isinstance(part, tuple | list) and len(part) == 2 for part in value):
        return f"{describe(value)}; these are pairs one by one, so wrap it in a DataLoader"
    arrays = any(type(part).__module__ == "numpy" for part in parts)
    return f"{describe(value)}; use torch.as_tensor on each" if arrays else describe(value)
