"""A network runs on inputs, or it is said in one sentence why it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dapcal.errors import CannotRun, NotOutputs
from dapcal.networks.reading import reads


def run(network: nn.Module, x: Tensor) -> object:
    """What a network returns for inputs x, on its own device."""
    device = next((parameter.device for parameter in network.parameters()), x.device)
    with running(network, x):
        return network(x.to(device))


@contextmanager
def running(network: nn.Module, x: Tensor) -> Iterator[None]:
    """Around a network that runs: what goes wrong inside it is told with the inputs it was given."""
    try:
        yield
    except (torch.OutOfMemoryError, CannotRun, NotOutputs, Warning):
        raise
    except Exception as error:
        fields = reads(network)
        given = {"inputs": x} if fields is None else fields.unpack(x)
        shapes = ", ".join(f"{name} {tuple(part.shape)} of {part.dtype}" for name, part in given.items())
        told = " ".join(str(error).split())[:200]
        raise CannotRun(
            f"The network could not run on {shapes} ({type(error).__name__}: {told}); check that these are what its "
            "forward takes, in shape, type and number"
        ) from error
