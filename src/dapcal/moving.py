"""A fitted object on another device: every tensor and network inside it, whatever it is made of."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


def moved(value: T, device: torch.device) -> T:
    """A copy whose tensors and networks are on `device`; one object in `value` is one object in the copy."""
    return _moved(value, device, {})


def _moved(value: Any, device: torch.device, done: dict[int, Any]) -> Any:
    if id(value) in done:
        return done[id(value)]
    if isinstance(value, Tensor):
        new: Any = value.to(device)
    elif isinstance(value, nn.Module):
        new = copy.deepcopy(value).to(device)
    elif isinstance(value, dict):
        new = {name: _moved(part, device, done) for name, part in value.items()}
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        new = type(value)(*(_moved(part, device, done) for part in value))
    elif isinstance(value, tuple | list):
        new = type(value)(_moved(part, device, done) for part in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        new = type(value)(**{name: _moved(getattr(value, name), device, done) for name in fields})
        if "network" in vars(value) and "network" not in fields:  # made from the fields: features are taken from it
            done[id(vars(value)["network"])] = new.network
    else:
        new = value
    done[id(value)] = new
    return new
