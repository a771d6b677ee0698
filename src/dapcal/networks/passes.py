"""One pass: what enters a network's layers at a batch of inputs is computed once, however many ask for it.

While `shared(network, x)` is open, whoever runs the network on the very tensor x leaves there what entered the layers
that others want (distances, the OOD score, a last layer's posterior), and they take it from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from dapcal.mapped import Rows, rows_like
from dapcal.networks.hooks import entering, unfused

BATCH = 512  # inputs at a time


@dataclass(frozen=True, eq=False)
class Pass:
    """Layers of a network at one batch of inputs.

    Attributes:
        network: whose layers.
        x: the inputs, this very tensor.
        wanted: layers that are worth catching when the network runs.
        by_draw_wanted: layers whose input in every draw is worth catching when all draws run.
        caught: what entered them, (N, ...) each.
        by_draw: what entered them in every draw, (S, N, ...) each.
        points: what projectors made of these, (N, P), by what tells projectors apart.
    """

    network: nn.Module
    x: Tensor
    wanted: tuple[str, ...]
    by_draw_wanted: tuple[str, ...] = ()
    caught: dict[str, Tensor] = field(default_factory=dict)
    by_draw: dict[str, Tensor] = field(default_factory=dict)
    points: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    def keep(self, entered: dict[str, Rows]) -> None:
        """What entered layers batch by batch; a layer that did not run once for every input is left out."""
        self.caught.update({layer: rows.joined for layer, rows in entered.items() if rows.count == len(self.x)})

    def keep_by_draw(self, entered: dict[str, Rows]) -> None:
        """What entered layers in every draw, (S, n, ...) batch by batch; left out as above."""
        self.by_draw.update({layer: rows.joined for layer, rows in entered.items() if rows.count == len(self.x)})


_OPEN: ContextVar[tuple[Pass, ...]] = ContextVar("open passes", default=())


@contextmanager
def shared(
    network: nn.Module | None,
    x: Tensor,
    layers: Iterable[str] = (),
    by_draw: Iterable[str] = (),
    same: Iterable[nn.Module] = (),
) -> Iterator[None]:
    """Share what enters the layers of a network at inputs x, as long as this is open.

    Memory: N × their widths, and for layers `by_draw` of all S draws S times as much.

    Args:
        network: whose layers.
        x: the inputs, this very tensor.
        layers: that are worth catching when the network runs.
        by_draw: those whose input in every draw is worth catching when all draws run.
        same: copies of the network, and of its draws, who take what it has left there.
    """
    if network is None:
        yield
        return
    first = Pass(network, x, tuple(layers), tuple(by_draw))
    token = _OPEN.set((*_OPEN.get(), first, *(replace(first, network=copy) for copy in same)))
    try:
        yield
    finally:
        _OPEN.reset(token)


def open_pass(network: nn.Module | None, x: Tensor) -> Pass | None:
    """The pass of this network over this very tensor, if one is open."""
    return next((one for one in _OPEN.get() if one.network is network and one.x is x), None)


def layer_input(network: nn.Module, layer: str, x: Tensor) -> Tensor:
    """What enters a layer at inputs x, (N, ...), without gradients: caught before, or by running the network."""
    open_one = open_pass(network, x)
    if open_one is not None and layer in open_one.caught:
        return open_one.caught[layer]
    wanted = {layer, *(open_one.wanted if open_one is not None else ())}
    entered = {name: rows_like(x) for name in sorted(wanted)}
    modules = {name: network.get_submodule(name) for name in entered}
    device = next(network.parameters()).device
    with torch.no_grad(), unfused():
        for batch in x.split(BATCH):
            before = len(entered[layer])
            with entering(modules, lambda name, z: entered[name].append(z)):
                network(batch.to(device))
            if (runs := len(entered[layer]) - before) != 1:
                raise ValueError(
                    f"Expected layer `{layer}` to run once in a forward pass, it ran {runs} times; name another"
                )
    if open_one is not None:
        open_one.keep(entered)
    return entered[layer].joined
