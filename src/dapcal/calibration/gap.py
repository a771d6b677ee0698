"""Gap cross-validation: choose φ where data are missing on purpose. Needs no OOD inputs and no target, only refits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dapcal.calibration.inputs import HeldOut, OODInputs
from dapcal.calibration.losses import Loss, Problem
from dapcal.calibration.reference import as_narrow
from dapcal.data import Labelled
from dapcal.distances import fit_distance
from dapcal.engines import Engine, named
from dapcal.engines.engine import in_order
from dapcal.mapped import BLOCK
from dapcal.types import Posterior


@dataclass(frozen=True, eq=False)
class GapCrossValidation(Loss):
    """−log predictive in held-out regions of the training set, pooled with ordinary held-out points.

    For each region the middle third of the training inputs along a random direction is left out, the posterior refitted
    to the rest (less a tenth, which fixes the radius and stands for ordinary points), and the log predictive read at
    both. It suits small models.

    Args:
        refit: (inputs, targets) to a posterior of the same kind.
        regions: number of gaps.
        seed: of directions and splits.
        engine: where posteriors are refitted: "local", or "ray", each as a call on a node of a cluster.
    """

    refit: Callable[[Tensor, Tensor], Posterior]
    regions: int = 4
    seed: int = 0
    engine: Engine | str = "local"

    def inputs(self, given: OODInputs | None) -> OODInputs:
        """It brings inputs of its own."""
        if given is not None:
            raise ValueError(
                "GapCrossValidation leaves out regions of its own and does not look at `ood`; leave it out"
            )
        return HeldOut("regions left out of the training set")

    def __call__(self, problem: Problem) -> Callable[[float], Tensor]:
        """Refit once per region; every φ is cheap after that."""
        generator = torch.Generator().manual_seed(self.seed)
        parts = [_parts(problem.train, generator) for _ in range(self.regions)]
        refits = in_order(named(self.engine), self.refit, _refitted, [kept for _, _, kept in parts])
        read = [self._region(problem, *part, refit) for part, refit in zip(parts, refits, strict=True)]
        return lambda factor: torch.cat([part(factor) for part in read])

    def _region(
        self, problem: Problem, missing: Labelled, ordinary: Labelled, kept: Labelled, posterior: Posterior
    ) -> Callable[[float], Tensor]:
        if problem.in_domain is not None:
            posterior = problem.in_domain(posterior, ordinary)
        posterior = as_narrow(posterior, problem.share)
        distance = fit_distance(problem.spaces, kept.x, ordinary.x, posterior, kept.y)
        probe = Labelled(torch.cat([missing.x, ordinary.x]), torch.cat([missing.y, ordinary.y]))
        adjusted, d0 = problem.adjust(posterior, probe.x), distance(probe.x)
        return lambda factor: -posterior.likelihood.log_prob(adjusted(factor * d0), probe.y)


def _parts(train: Labelled, generator: torch.Generator) -> tuple[Labelled, Labelled, Labelled]:
    """Rows of a region that is left out, ordinary ones beside it, and those that are kept."""
    gap, rest = gap_split(train.x, generator)
    rest = rest[torch.randperm(len(rest), generator=generator)]
    tenth = max(2, len(rest) // 10)
    return train.subset(gap), train.subset(rest[:tenth]), train.subset(rest[tenth:])


def _refitted(refit: Callable[[Tensor, Tensor], Posterior], kept: Labelled) -> Posterior:
    return refit(kept.x, kept.y)


def gap_split(x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows in the middle third along a random direction, and the others."""
    direction = torch.randn(x[0].numel(), generator=generator, dtype=torch.float64).to(x.device)
    order = torch.cat([block.flatten(1).double() @ direction for block in x.split(BLOCK)]).argsort()
    third = len(order) // 3
    return order[third : len(order) - third], torch.cat([order[:third], order[len(order) - third :]])
