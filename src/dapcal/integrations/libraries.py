"""Classes of libraries that may not be installed: what derives from them can be imported, and says so when made."""

from __future__ import annotations

import importlib
from typing import Any


def base(name: str, extra: str, *modules: str) -> Any:
    """The class `name` of the first of some modules that can be imported, or a stand-in that refuses to be made.

    Args:
        name: of the class.
        extra: of dapcal's, which installs the library.
        modules: where to look, by preference.
    """
    told = ""
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            told = told or str(error)

    class Missing:
        """In the place of a class that is not there."""

        def __init__(self, *_values: Any, **_options: Any) -> None:
            raise ImportError(
                f"{type(self).__name__} needs {modules[0]} ({told}); install it with: pip install 'dapcal[{extra}]'"
            )

    return Missing
