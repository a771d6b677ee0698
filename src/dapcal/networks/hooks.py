"""What enters and leaves a network's layers while it runs, in this thread alone.

Hooks belong to a module, and every thread that runs it calls them: what is caught or changed here is that of the thread
that asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import Lock, get_ident
from typing import Any

import torch
from torch import Tensor, nn

from dapcal.networks.running import run

Enters = Callable[[str, Tensor], None]
"""Told the name of a layer and what it was called with first."""

Leaves = Callable[[str, Any], Any]
"""Told the name of a layer and what it returned; what comes back, if anything, takes its place."""


@contextmanager
def entering(layers: Mapping[str, nn.Module], tell: Enters) -> Iterator[None]:
    """Be told what enters some layers, each time that one of them runs in this thread."""
    thread = get_ident()

    # torch adds a hook first and then that it takes keywords: another thread may call it in between, without them
    def hook(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if get_ident() == thread:
            tell(name, first_input(args, kwargs or {}))

    with _registered(
        [layer.register_forward_pre_hook(partial(hook, name), with_kwargs=True) for name, layer in layers.items()]
    ):
        yield


@contextmanager
def leaving(layers: Mapping[str, nn.Module], change: Leaves) -> Iterator[None]:
    """See, and change, what leaves some layers, each time that one of them runs in this thread."""
    thread = get_ident()

    def hook(name: str, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        return change(name, output) if get_ident() == thread else None

    with _registered([layer.register_forward_hook(partial(hook, name)) for name, layer in layers.items()]):
        yield


@contextmanager
def _registered(handles: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def execution_order(network: nn.Module, modules: Mapping[str, nn.Module], x: Tensor) -> list[str]:
    """Names of some of a network's modules in the order in which they run on x."""
    order: list[str] = []
    with torch.no_grad(), unfused(), entering(modules, lambda name, _: order.append(name)):
        run(network, x)
    return order


@contextmanager
def unfused() -> Iterator[None]:
    """Transformer layers in evaluation mode may run as one kernel, which calls no hooks inside."""
    with _LOCK:  # one setting for all threads: the first inside sets it, the last one gives it back
        _UNFUSED.append(_UNFUSED[0] if _UNFUSED else torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _LOCK:
            before = _UNFUSED.pop()
            if not _UNFUSED:
                torch.backends.mha.set_fastpath_enabled(before)


_UNFUSED: list[bool] = []  # for every thread inside, what was set before the first
_LOCK = Lock()


def first_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """What a layer was called with first, by position or by name; an empty tensor, if it was called with nothing."""
    return next(iter((*args, *kwargs.values())), torch.empty(0))
