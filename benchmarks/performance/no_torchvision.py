"""pytorch-ood without torchvision, which does not import beside a CPU build of torch.

Its pretrained networks ask for it when they are imported; its detectors use nothing of it.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def stand_in() -> None:
    """Let `import torchvision` give empty modules whose names are all empty classes, unless there is a true one."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        sys.meta_path.append(_Finder())


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """One of torchvision's modules."""
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty one."""
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run."""


class _Empty(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})
