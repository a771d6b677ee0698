"""The door: data as people have them become plain tensors, and the network one that takes these.

What is one tensor of inputs already passes as it is. Dicts, several inputs and variable lengths are packed
(`dapcal.inputs`), and the network unpacks them when it runs (`dapcal.networks.reading`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from itertools import chain
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dapcal.data import Labelled, Ragged, gather
from dapcal.inputs import Fields, Parts, Takes, batches_of, find_fields, first_batch, is_lazy, parts_of, takes_of
from dapcal.mapped import Rows, joined, largest_like
from dapcal.networks.heads import head_at_places, head_of, with_head_last
from dapcal.networks.layout import plain
from dapcal.networks.padding import check_padding
from dapcal.networks.reading import pad_id_of, reading, reads, taken_by

P = ParamSpec("P")
T = TypeVar("T")


class Taken(NamedTuple):
    """What stands behind the door: a network or posterior that takes packed fields, and data for it by their names."""

    subject: Any
    fields: Fields | None
    data: dict[str, Any]


def any_inputs(fit: Callable[P, T]) -> Callable[P, T]:
    """A fit of (model, likelihood, train, held_out=…) that is given plain tensors, whatever it was called with."""

    @wraps(fit)
    def with_any(*args: P.args, **kwargs: P.kwargs) -> T:
        given: dict[str, Any] = dict(zip(("model", "likelihood", "train"), args, strict=False)) | kwargs
        if len(args) > 3 or not isinstance(given.get("model"), nn.Module) or "train" not in given:
            return fit(*args, **kwargs)  # which says what is wrong
        data: dict[str, Any] = {name: given[name] for name in ("train", "held_out") if name in given}
        taken = take(given["model"], data, loaders=True)
        return cast("Callable[..., T]", fit)(**{**given, "model": taken.subject, **taken.data})

    return with_any


def take(
    subject: Any, data: Mapping[str, Any], unlabelled: Mapping[str, Any] | None = None, loaders: bool = False
) -> Taken:
    """Data behind the door, with a network or posterior that takes them.

    Args:
        subject: a network, or a posterior with one in its field `model`.
        data: with targets, by name; None where there are none.
        unlabelled: inputs that need no targets, by name; a rule that makes inputs stays one.
        loaders: whether a DataLoader stays one, which may augment its inputs anew every epoch; else all is in memory.
    """
    subject = plain(subject) if isinstance(subject, nn.Module) else subject
    network = subject if isinstance(subject, nn.Module) else getattr(subject, "model", None)
    fields, further = reads(network), dict(unlabelled or {})
    everything = {**data, **further} if loaders else {n: _unpacked(one) for n, one in {**data, **further}.items()}
    waiting = {name: everything[name] for name in data if not _is_ready(everything[name], fields)}
    asking = {n: everything[n] for n in further if not _is_ready(everything[n], fields) and not callable(everything[n])}
    if fields is None and not any(map(_has_fields, (*waiting.values(), *asking.values()))):
        try:
            if not loaders:
                everything |= {name: gather(one, name) for name, one in waiting.items()}
            return Taken(_head_last(subject, _ids(everything)), None, everything)
        except Ragged:
            if not isinstance(network, nn.Module):
                raise
    if not isinstance(network, nn.Module):
        raise TypeError(
            "Expected inputs as one tensor (N, ...) for a posterior without a network (it is a function of them); give "
            f"one tensor, got {sorted([*waiting, *asking])} with several"
        )
    takes = taken_by(network) if fields is None else takes_of(fields)
    passing = {name: one for name, one in waiting.items() if loaders and isinstance(one, DataLoader)}
    held = {name: _held(one, takes, name) for name, one in waiting.items() if name not in passing}
    if fields is None:
        passed = [_few(parts) for name, one in passing.items() for parts in _parts(one, takes, name)]
        found = [*chain(*held.values()), *passed]
        fields = find_fields(found, " and ".join(waiting), pad_id_of(network))
        if fields.varies:
            check_padding(reading(network, fields), fields, found)
    inputs = {name: list(_parts(one, takes, name, fields)) for name, one in asking.items()}
    subject = _reading(subject, fields)
    few = next((_few(part).inputs for part in chain(*held.values(), *inputs.values())), None)
    subject = _head_last(subject, None if few is None or fields.dtype.is_floating_point else fields.pack(few, "train"))
    longest = max((fields.places(part.inputs) for part in chain(*held.values(), *inputs.values())), default=0)
    return Taken(
        subject,
        fields,
        {
            **everything,
            **{name: _packed(parts, fields, name, longest) for name, parts in {**held, **inputs}.items()},
            **{name: _packing(one, takes, fields, name) for name, one in passing.items()},
        },
    )


def packed(x: Any, fields: Fields, name: str) -> Tensor:
    """One batch of inputs as they are given, packed; targets beside them are not looked at."""
    return x if fields.holds(x) else fields.pack(parts_of(x, takes_of(fields), name, False, fields).inputs, name)


def packed_batches(data: Any, fields: Fields, batch_size: int) -> Iterator[Tensor]:
    """Packed batches of data in memory, a data set or a loader, which has its own batches."""
    for batch in [data] if fields.holds(data) else batches_of(data):
        found = packed(batch, fields, "data")
        yield from (found,) if isinstance(data, DataLoader) else found.split(batch_size)


@dataclasses.dataclass(frozen=True)
class Packing:
    """What a loader does to its items: what it did before, and then its batches are packed."""

    collate: Callable[[Any], Any]
    takes: Takes
    fields: Fields
    name: str

    def __call__(self, items: Any) -> tuple[Tensor, Tensor | None]:
        """A packed batch and its targets."""
        parts = parts_of(self.collate(items), self.takes, self.name)
        return self.fields.pack(parts.inputs, self.name), parts.targets


def _packing(loader: DataLoader, takes: Takes, fields: Fields, name: str) -> DataLoader:
    """The same loader (its sampler, workers and generator) with packed batches."""
    own = copy.copy(loader)
    own.collate_fn = Packing(loader.collate_fn, takes, fields, name)
    own._iterator = None  # of workers that stay, which pack nothing
    return own


def _parts(data: Any, takes: Takes, name: str, fields: Fields | None = None) -> Iterator[Parts]:
    """Batches taken apart; with `fields` those of inputs that need no targets."""
    for batch in batches_of(data):
        yield parts_of(batch, takes, name, fields is None, fields)


def _held(data: Any, takes: Takes, name: str) -> list[Parts]:
    """All batches taken apart, by one pass; of what is read item by item, many are in files."""
    if not is_lazy(data):
        return list(_parts(data, takes, name))
    kept = defaultdict[tuple[str, torch.dtype], Rows](Rows)

    def put(key: str, batch: Tensor) -> Callable[[], Tensor]:
        rows = kept[key, batch.dtype]
        rows.append(batch)
        return partial(lambda place: rows.batches[place], len(rows) - 1)

    places = [
        (
            {key: put(key, part) for key, part in parts.inputs.items()},
            None if parts.targets is None else put("targets", parts.targets),
            parts.call,
        )
        for parts in _parts(data, takes, name)
    ]
    return [
        Parts({key: get() for key, get in inputs.items()}, None if targets is None else targets(), call)
        for inputs, targets, call in places
    ]


def _packed(batches: list[Parts], fields: Fields, name: str, length: int) -> Labelled | Tensor:
    """All batches in one tensor, with their targets where all have some."""
    if not batches:
        raise ValueError(f"Expected at least one input in `{name}`, got none")
    largest = largest_like(*(part for parts in batches for part in parts.inputs.values()))
    x = joined((fields.pack(parts.inputs, name, length) for parts in batches), largest)
    targets = [parts.targets for parts in batches if parts.targets is not None]
    if len(targets) < len(batches):
        return x
    if len({tuple(y.shape[1:]) for y in targets}) > 1:
        raise ValueError(
            f"Expected targets of one shape in `{name}`, got {sorted({tuple(y.shape[1:]) for y in targets})} an input; "
            "give one target an input"
        )
    return Labelled(x, joined(targets, largest))


def _reading(subject: Any, fields: Fields) -> Any:
    """The network, or the posterior with its network, as one that takes packed fields."""
    if isinstance(subject, nn.Module):
        return reading(subject, fields)
    return dataclasses.replace(subject, model=reading(subject.model, fields))


def _few(parts: Parts) -> Parts:
    """Two rows of a batch, of which no more is kept."""
    return parts._replace(inputs={name: part[:2] for name, part in parts.inputs.items()})


def _unpacked(data: Any) -> Any:
    """A loader as it was before its batches were packed."""
    if not isinstance(data, DataLoader) or not isinstance(data.collate_fn, Packing):
        return data
    own = copy.copy(data)
    own.collate_fn, own._iterator = data.collate_fn.collate, None
    return own


def _head_last(subject: Any, x: Tensor | None) -> Any:
    """The network, or the posterior with its network, whose head runs once, where it ran at every place of texts x."""
    network = subject if isinstance(subject, nn.Module) else getattr(subject, "model", None)
    if x is None or not isinstance(network, nn.Module) or head_of(network) is not None:
        return subject
    changed = with_head_last(network, head_at_places(network, x))
    return changed if isinstance(subject, nn.Module) else dataclasses.replace(subject, model=changed)


def _ids(data: Mapping[str, Any]) -> Tensor | None:
    """Two rows of plain inputs, if they are whole numbers."""
    train = data.get("train")
    x = train[0] if isinstance(train, tuple | list) and train else None
    return x[:2] if isinstance(x, Tensor) and not x.is_floating_point() and x.ndim > 1 and len(x) else None


def _is_ready(data: Any, fields: Fields | None) -> bool:
    """Whether data need nothing more: none at all, in memory, or packed already."""
    if data is None or isinstance(data, Labelled):
        return True
    if isinstance(data, DataLoader):
        return isinstance(data.collate_fn, Packing)
    pair = isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[1], Tensor)
    return fields is not None and fields.holds(data[0] if pair else data)


def _has_fields(data: Any) -> bool:
    """Whether batches are more than one tensor of inputs and one of targets."""
    batch = first_batch(data) if is_lazy(data) else data
    if isinstance(batch, Mapping):
        return True
    if not isinstance(batch, tuple | list) or not batch:
        return False
    several = isinstance(batch[0], tuple | list) and all(isinstance(part, Tensor) for part in batch[0])
    return isinstance(batch[0], Mapping) or several or (len(batch) > 2 and isinstance(batch[0], Tensor))
