"""Modules under an old name hand on what is asked of them, with a warning, for one version."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any


def hand_on(old: str, new: str) -> Callable[[str], Any]:
    """A module's `__getattr__` that looks in the module of the new name."""

    def attribute(name: str) -> Any:
        target = import_module(new)
        if name.startswith("_") or not hasattr(target, name):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        warnings.warn(f"{old} is now {new}; the old name goes with the next version", DeprecationWarning, stacklevel=2)
        return getattr(target, name)

    return attribute
