"""A network that takes fields: called with one packed tensor, it unpacks it and runs as it always has.

The packing is a hook on a copy of the network's outermost module, which shares all that is inside: the user's network
stays as it is, and names of layers and parameters are the same.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dapcal.inputs import Fields, Takes


@dataclass(frozen=True)
class Unpack:
    """A hook that runs before a network: one packed tensor becomes the tensors that it takes; all else passes."""

    fields: Fields

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """What the network is called with; None leaves it as it is."""
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
            return None
        parts = self.fields.unpack(args[0])
        if self.fields.call == "keywords":
            return (), parts
        return ((parts,) if self.fields.call == "mapping" else tuple(parts.values())), {}


def reads(network: object) -> Fields | None:
    """The fields that a network unpacks; None where it takes one plain tensor."""
    hooks = network._forward_pre_hooks.values() if isinstance(network, nn.Module) else ()
    return next((hook.fields for hook in hooks if isinstance(hook, Unpack)), None)


def reading(network: nn.Module, fields: Fields | None) -> nn.Module:
    """The network as one that takes packed fields; it shares its layers with the one that was given."""
    if fields is None or reads(network) == fields:
        return network
    own = copy.copy(network)
    for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):  # a copy shares these, too
        own.__dict__[name] = OrderedDict(getattr(network, name))
    for key, hook in list(own._forward_pre_hooks.items()):
        if isinstance(hook, Unpack):
            del own._forward_pre_hooks[key]
    own.register_forward_pre_hook(Unpack(fields), with_kwargs=True, prepend=True)
    return own


def taken_by(network: nn.Module) -> Takes:
    """What a network's forward takes, by its signature."""
    try:
        parameters = list(inspect.signature(network.forward).parameters.values())
    except (TypeError, ValueError):
        return Takes((), 0, (), True)
    placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return Takes(
        names=tuple(p.name for p in placed),
        required=sum(p.default is p.empty for p in placed),
        keywords=tuple(named),
        any_name=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def pad_id_of(network: nn.Module) -> int | None:
    """The token id that pads, where a network says it: its configuration, or its table of embeddings."""
    said = getattr(getattr(network, "config", None), "pad_token_id", None)
    if isinstance(said, int):
        return said
    tables = [module for module in network.modules() if isinstance(module, nn.Embedding)]
    return next((table.padding_idx for table in tables if table.padding_idx is not None), None)
