"""How a class says what an artefact stores of it.

A class that may be stored has `stores = Stores()`; its fields are stored, but for those that it names. That is all: an
artefact finds the class by its name in the module where it lives (`dapcal.reading.ROOMS`).
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Stores:
    """What is stored of an object: its fields.

    Attributes:
        given: fields that may hold code of the user's own (a network, a function). Code is not stored: whoever loads
            gives it again, by the argument of `dapcal.load` that stands beside the field here.
        network: a field that holds the network of the artefact's posterior, which is stored once, as the posterior.
        again: a field that may hold an object that is stored before, as a rule the artefact's posterior; it is stored
            once.
        in_file: fields that hold a tensor which stays in the file when it is large, until its numbers are asked for
            (`dapcal.in_file`). The object is built without reading them. Loading tries it with the first rows of
            them, or as it is where it refuses to be built from these: then a search should look at few rows.
    """

    given: Mapping[str, str] = field(default_factory=dict)
    network: str | None = None
    again: str | None = None
    in_file: tuple[str, ...] = ()


def check_fields(kind: type, given: Mapping[str, Any], unchecked: typing.Container[str] = ()) -> None:
    """Refuse fields that a class does not have, lacks, or declares with another type; as a file may hold them.

    Args:
        kind: a dataclass that may be stored.
        given: values by the name of their field.
        unchecked: fields that hold code of the user's own.
    """
    declared = _declared(kind)
    missing = [name for name, (_, required) in declared.items() if required and name not in given]
    unknown = [name for name in given if name not in declared]
    if missing or unknown:
        raise ValueError(f"{kind.__name__} lacks {missing[:4]} and does not know {unknown[:4]}")
    for name, value in given.items():
        if name not in unchecked and not fits(value, declared[name][0]):
            raise ValueError(f"`{name}` of {kind.__name__} is of type {type(value).__name__}")


def fits(value: Any, wanted: Any) -> bool:
    """Whether a value is of the type of an annotation.

    >>> fits((1, 2), tuple[int, ...]), fits((1, "a"), tuple[int, ...]), fits(True, int), fits(None, int | None)
    (True, False, False, True)
    """
    origin, parts = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is Any or isinstance(wanted, typing.TypeVar):
        return True
    if wanted is None or wanted is type(None):
        return value is None
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if origin is typing.Literal:
        return value in parts
    if origin is tuple:
        expected = parts[:1] * len(value) if isinstance(value, tuple) and parts[-1] is Ellipsis else parts
        return isinstance(value, tuple) and len(value) == len(expected) and all(map(fits, value, expected))
    if origin is dict:
        return isinstance(value, dict) and all(fits(k, parts[0]) and fits(v, parts[1]) for k, v in value.items())
    if origin is not None:  # a callable, as a rule
        return callable(value) if origin is Callable else isinstance(value, origin)
    if wanted is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if getattr(wanted, "_is_protocol", False):
        return all(_has(value, name) for name in _members(wanted))
    return isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))


@cache
def _declared(kind: type) -> dict[str, tuple[Any, bool]]:
    """The type of every field, and whether it must be given."""
    hints = typing.get_type_hints(kind)
    return {
        f.name: (hints[f.name], f.default is MISSING and f.default_factory is MISSING) for f in fields(kind) if f.init
    }


def _members(protocol: type) -> set[str]:
    own = {name for base in protocol.__mro__ if getattr(base, "_is_protocol", False) for name in vars(base)}
    annotated = {name for base in protocol.__mro__ for name in vars(base).get("__annotations__", ())}
    return {name for name in own | annotated if not name.startswith("_") or name == "__call__"}


def _has(value: Any, name: str) -> bool:
    """Without asking for it, which may cost much."""
    return inspect.getattr_static(value, name, _has) is not _has
