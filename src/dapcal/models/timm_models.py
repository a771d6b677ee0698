"""A model of timm's by its name, without its weights: `timm:resnet18,num_classes=10,in_chans=1`."""

from __future__ import annotations

import torch
from torch import nn


def model(name: str) -> nn.Module:
    """What `timm.create_model` makes; numbers after the name are its options. Nothing is downloaded.

    Args:
        name: e.g. "resnet18", or with options "resnet18,num_classes=10,in_chans=1".
    """
    named, *options = (part.strip() for part in name.split(","))
    numbers = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key.strip().isidentifier() or not value.strip().isdigit():
            raise ValueError(f"Expected options like num_classes=10 after the name of timm's model, got {option!r}")
        numbers[key.strip()] = int(value)
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # torchvision of another build ends in either
        raise ImportError(
            f"timm:{named} needs timm ({error}); install it, and the torchvision of your torch"
        ) from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            return timm.create_model(named, pretrained=False, **numbers)
        except Exception as error:  # its models raise anything
            raise ValueError(
                f"timm cannot make the model {named!r} ({error}); see timm.list_models(), and its options"
            ) from error
