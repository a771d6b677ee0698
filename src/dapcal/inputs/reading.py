"""What a batch holds: the tensors that a network takes, by name, and the targets beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dapcal.data import describe, with_remedy
from dapcal.inputs.fields import Fields

TARGETS = ("labels", "label", "label_ids", "targets", "target", "y")


class Takes(NamedTuple):
    """What a network's forward takes.

    Attributes:
        names: of what it takes by position, in order.
        required: how many of these have no default.
        keywords: names that it takes by keyword, those above included.
        any_name: whether it takes any keyword.
    """

    names: tuple[str, ...]
    required: int
    keywords: tuple[str, ...]
    any_name: bool = False


class Parts(NamedTuple):
    """A batch taken apart."""

    inputs: dict[str, Tensor]
    targets: Tensor | None
    call: str  # how the network takes the inputs: "keywords", "positions" or "mapping"


def parts_of(batch: Any, takes: Takes, name: str, labelled: bool = True, known: Fields | None = None) -> Parts:
    """Inputs by name, and targets where there are any.

    Args:
        batch: a dict with targets among its entries; (inputs, targets), where inputs are a tensor, a dict or several
            tensors; or several tensors of which the last are targets, if the network takes as many as are left.
        takes: what the network takes.
        name: what errors call the data.
        labelled: whether targets must be there.
        known: the fields, if they are known: without targets, as many tensors are the inputs.
    """
    if isinstance(batch, Mapping):
        targets = targets_in(batch)
        if labelled and targets is None:
            raise TypeError(
                f"Expected targets in `{name}` under one of {list(TARGETS)}, got {list(batch)}; rename them, or give "
                "(inputs, targets)"
            )
        return _of_mapping(batch, targets, takes, name)
    if isinstance(batch, Tensor) and not labelled:
        batch = [batch]
    if not isinstance(batch, tuple | list) or not batch:
        raise TypeError(f"Expected `{name}` to yield (inputs, targets) or dicts, got {with_remedy(batch)}")
    inputs, targets = _apart(batch, takes, name, labelled, known)
    if isinstance(inputs, Mapping):
        return _of_mapping(inputs, targets, takes, name)
    return Parts({_place(takes, i): _tensor(part, name) for i, part in enumerate(inputs)}, targets, "positions")


def takes_of(fields: Fields) -> Takes:
    """What a network takes whose fields are known."""
    by_name = fields.names if fields.call == "keywords" else ()
    places = fields.names if fields.call == "positions" else ("inputs",)
    return Takes(places, len(places), by_name)


def targets_in(batch: Mapping[str, Any]) -> Tensor | None:
    """The targets among the entries of a dict."""
    found = [key for key in TARGETS if batch.get(key) is not None]
    if len(found) > 1:
        raise TypeError(f"Expected targets under one name, got {found}; leave all but one out")
    return torch.as_tensor(batch[found[0]]) if found else None


def _apart(
    batch: Sequence[Any], takes: Takes, name: str, labelled: bool, known: Fields | None
) -> tuple[Mapping[str, Any] | Sequence[Any], Tensor | None]:
    """Inputs, a mapping or several, and targets."""
    first = batch[0]
    if isinstance(first, Mapping | tuple | list):
        if len(batch) > 2 or (labelled and len(batch) < 2):
            raise TypeError(f"Expected `{name}` to yield (inputs, targets), got {with_remedy(batch)}")
        return first, torch.as_tensor(batch[1]) if len(batch) == 2 else None
    count = len(batch)
    if not labelled:
        inputs = len(known.fields) if known is not None else 1
        if count in (inputs, inputs + 1):
            return batch[:inputs], torch.as_tensor(batch[inputs]) if count > inputs else None
    elif count == 2:
        return batch[:1], torch.as_tensor(batch[1])
    elif takes.required >= 2 and takes.required <= count - 1 <= len(takes.names):
        return batch[:-1], torch.as_tensor(batch[-1])
    takes_words = f"the network takes {list(takes.names)}" if takes.names else "the network takes what it is given"
    raise TypeError(
        f"Expected `{name}` to yield (inputs, targets), got {describe(batch)}, and {takes_words}; yield several inputs "
        "as ((a, b), targets), or a dict"
    )


def _of_mapping(inputs: Mapping[str, Any], targets: Tensor | None, takes: Takes, name: str) -> Parts:
    """Of the entries of a dict those that the network takes by name; all, where it takes a dict."""
    given = {str(key): value for key, value in inputs.items() if key not in TARGETS and value is not None}
    wanted = {key: value for key, value in given.items() if key in takes.keywords}
    call = "keywords"
    if not wanted:
        wanted = {key: value for key, value in given.items() if _numbers(value)}
        call = "keywords" if takes.any_name else "positions" if len(wanted) == 1 else "mapping"
        if not takes.any_name and (takes.required > 1 or not takes.names):
            raise TypeError(
                f"Expected `{name}` with inputs by the names that the network takes, {list(takes.keywords)}, got "
                f"{list(given)}; rename them"
            )
    if not wanted:
        raise TypeError(f"Expected tensors in the dicts of `{name}`, got {describe(inputs)}")
    return Parts({key: _tensor(value, name, key) for key, value in wanted.items()}, targets, call)


def _place(takes: Takes, place: int) -> str:
    return takes.names[place] if place < len(takes.names) else str(place)


def _numbers(value: Any) -> bool:
    try:
        torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def _tensor(value: Any, name: str, key: str = "inputs") -> Tensor:
    """A batch of an input."""
    try:
        found = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"Expected tensors in `{name}`, got `{key}` as {describe(value)}; make a tensor of it"
        ) from error
    if found.ndim == 0:
        raise ValueError(f"Expected a batch (N, ...) of `{key}` in `{name}`, got a single number")
    return found
