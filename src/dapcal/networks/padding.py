"""Whether padding leaves a network's outputs as they are: only then may inputs of several lengths lie side by side."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dapcal.inputs import Fields, Parts
from dapcal.networks.evaluation import checked_outputs
from dapcal.networks.layout import frozen_copy
from dapcal.networks.running import run

_ROWS = 2  # of the shortest batch


def check_padding(network: nn.Module, fields: Fields, batches: list[Parts]) -> None:
    """Refuse a network to which more padding makes a difference.

    Args:
        network: takes packed fields.
        fields: of which some vary in length.
        batches: all there are.
    """
    lengths = [fields.places(parts.inputs) for parts in batches]
    if not lengths or min(lengths) == max(lengths):
        return
    short = batches[lengths.index(min(lengths))]
    rows = {name: part[:_ROWS] for name, part in short.inputs.items()}
    frozen = frozen_copy(network)
    alone, padded = (_outputs(frozen, fields.pack(rows, "train", length)) for length in (0, max(lengths)))
    change = float((alone - padded).abs().max())
    if change > 1e-3 * max(1.0, float(alone.abs().max())):
        raise ValueError(
            f"Inputs have {min(lengths)} to {max(lengths)} places, and padding them to one length changes this "
            f"network's outputs (by {change:.2g}); let it heed an attention mask or lengths, or pad all inputs to one "
            "length, as in training"
        )


def _outputs(network: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return checked_outputs(run(network, x), len(x))
