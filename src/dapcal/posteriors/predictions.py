"""Predictions alone: anything that returns stacked outputs (S, N, C) is a posterior."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dapcal.likelihoods import Likelihood
from dapcal.storing import Stores


@dataclass(frozen=True, eq=False)
class StackedPredictions:
    """A posterior of which only the outputs of its draws are known (a wrapped ensemble, a service, another library).

    Inflate needs no more. There is no network to take features from: distances are measured between inputs unless a
    projector is given.

    Args:
        function: inputs (N, ...) to outputs (S, N, C); must give the same draws on every call.
        likelihood: p(y | outputs).
    """

    stores = Stores(given={"function": "model", "likelihood": "likelihood"})

    function: Callable[[Tensor], Tensor]
    likelihood: Likelihood

    gaussian: None = None
    prior: None = None
    network: nn.Module | None = None
    squared_norms: None = None

    def outputs(self, x: Tensor) -> Tensor:
        """Outputs of all draws, (S, N, C)."""
        with torch.no_grad():
            outputs = self.function(x)
        if outputs.ndim != 3 or outputs.shape[1] != len(x):
            raise ValueError(
                f"Expected stacked predictions (S, {len(x)}, C) for {len(x)} inputs, got {tuple(outputs.shape)}; "
                "draws come first"
            )
        if not outputs.isfinite().all():
            raise ValueError("Expected finite predictions, got NaN or inf")
        return outputs

    def moments(self, x: Tensor, moving: bool = False) -> None:  # noqa: ARG002
        """None: draws are all there is."""
        return
