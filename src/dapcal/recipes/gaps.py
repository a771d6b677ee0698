"""Which adjustment, and which φ: read off networks that were refitted with regions of the training rows left out.

    training rows ──► region │ ordinary rows │ kept rows ──► refits side by side ──► log predictive in the region

The ordinary rows stand for the held-out ones: they stop a refit, scale it in-domain and fix its radius. Rows that are
held out of the table are in no refit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.adjust import Inflate, OfTrainingTargets, Revert
from dapcal.calibration.gap_choice import Read
from dapcal.calibration.in_domain import in_domain, with_likelihood
from dapcal.calibration.inputs import HeldOut, OODInputs
from dapcal.calibration.losses import Loss, Problem
from dapcal.calibration.reference import as_narrow
from dapcal.calibration.regions import Region, thirds
from dapcal.data import Labelled, gather
from dapcal.distances import Space, fit_distance
from dapcal.errors import NothingToCalibrate
from dapcal.likelihoods import ClassLikelihood, Likelihood, NormalLikelihood
from dapcal.networks import TableNetwork
from dapcal.posteriors import ensemble, sharing
from dapcal.posteriors.network import NetworkPosterior
from dapcal.recipes.boosting import same_trees
from dapcal.recipes.estimators import Brought
from dapcal.recipes.posteriors import PATIENCE, Task, around, members_of, schedule_of
from dapcal.recipes.recipe import Recipe
from dapcal.types import Adjustment, DapcalWarning, Posterior

REGIONS = 12
WHOLE = 1000  # rows up to which a refit is trained as the posterior is; of more, where that takes long:
MEMBERS = 3  # of a refitted ensemble, at most
SHARING = 3  # likewise, where they share weights
MOST_KEPT = 2000  # rows that a refit learns, at most: a random choice of the others
MOST_READ = 500  # rows of a region that are read, at most
FEWEST_ROWS = 60  # in training; with fewer a refit would learn next to nothing
FEWEST_REGIONS = 3  # of which a standard error is taken
ORDINARY = 0.1  # share of the rows outside a region, at least FEWEST_ORDINARY
FEWEST_ORDINARY = 20
ROUNDS = 60  # of the trees beside a refit, at most
SHORTER = 0.5  # epochs of a refit, as a share of those that the rows would ask for
SHARING_SHORTER = 0.25  # likewise, where members share weights
FACTORS = torch.logspace(-4, 4, 65, dtype=torch.float64)  # that are tried, times the unit of the search


def adjustments(likelihood: Likelihood, recipe: Recipe) -> dict[str, Adjustment]:
    """What is chosen among, beside no adjustment, from plain to rich."""
    plain: dict[str, Adjustment] = {"Inflate": Inflate(limit=OfTrainingTargets(own_spread=recipe.logarithms))}
    return plain if isinstance(likelihood, ClassLikelihood) else {**plain, "Revert": Revert()}


@dataclass(frozen=True, eq=False)
class Gaps:
    """Refits in their regions, ready for every factor g(φ).

    Attributes:
        regions: of the training rows.
        offered: adjustments by name.
        none: mean log predictive in every region without adjustment, (R,).
        at: by the name of an adjustment, from a factor to the same with it.
        unit: factor at which a typical row of a region is one prior scale away.
    """

    regions: tuple[Region, ...]
    offered: Mapping[str, Adjustment]
    none: Tensor
    at: Mapping[str, Callable[[float], Tensor]]
    unit: float

    @property
    def factors(self) -> Tensor:
        """That are tried, (M,)."""
        return self.unit * FACTORS

    def curves(self) -> dict[str, Tensor]:
        """Mean log predictive in every region at every factor, (R, M), by adjustment."""
        return {name: torch.stack([at(float(f)) for f in self.factors], 1) for name, at in self.at.items()}

    def read(self, factors: Mapping[str, float]) -> tuple[Read, ...]:
        """What is stored: every region with each adjustment at one factor."""
        after = {name: self.at[name](factor) for name, factor in factors.items()}
        return tuple(
            Read(
                region.kind,
                region.column,
                min(len(region.missing), MOST_READ),
                float(self.none[place]),
                {name: float(values[place]) for name, values in after.items()},
            )
            for place, region in enumerate(self.regions)
        )


@dataclass(frozen=True, eq=False)
class InRegions(Loss):
    """−mean log predictive of every region: the loss that φ minimises, each region counting once."""

    at: Callable[[float], Tensor]

    def inputs(self, given: OODInputs | None) -> OODInputs:
        """It has read its inputs already."""
        assert given is None
        return HeldOut("regions left out of the training rows")

    def __call__(self, problem: Problem) -> Callable[[float], Tensor]:  # noqa: ARG002
        """One value for each region."""
        return lambda factor: -self.at(factor)


class _Part(NamedTuple):
    """A region's rows by what they are for."""

    region: Region
    missing: Labelled
    ordinary: Labelled
    kept: Labelled
    weights: Tensor | None  # of the kept rows


def read_gaps(
    task: Task,
    posterior: Posterior,
    spaces: tuple[Space, ...],
    scaled: bool,
    share: float,
    progress: Callable[[int, int], None],
) -> Gaps | None:
    """Refit with regions left out, and read the log predictive there; None where the table has too few rows for it.

    Args:
        task: what the posterior was fitted to.
        posterior: with trees beside its members or without, as every refit.
        spaces: that distances are measured in, fitted anew in every region.
        scaled: scale every refit in-domain, as the posterior itself is.
        share: of its spread that the posterior keeps, and so every refit.
        progress: told how many epochs of how many are done.
    """
    train = gather(task.train, "train")
    if len(train.x) < FEWEST_ROWS or not spaces:
        return None
    generator = torch.Generator().manual_seed(task.recipe.seed)
    parts = [_part(train, region, generator, task.weights) for region in thirds(train.x, generator, REGIONS)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DapcalWarning)  # of twelve radii; the table's own has its note
        seed = task.recipe.seed + 1
        refits = [
            same_trees(one, posterior, part.kept, seed, ROUNDS, part.weights)
            for part, one in zip(parts, _refits(task, posterior, parts, progress), strict=True)
        ]
        refits = [_with_noise_of(posterior, one) for one in refits]
        scaled = scaled or isinstance(posterior.likelihood, NormalLikelihood)
        offered = adjustments(posterior.likelihood, task.recipe)
        found = [_found(*pair, offered, spaces, scaled, share) for pair in zip(parts, refits, strict=True)]
    kept = [(part, one) for part, one in zip(parts, found, strict=True) if one is not None]
    away = torch.cat([one.away for _, one in kept]) if kept else torch.empty(0)
    if len(kept) < FEWEST_REGIONS or not len(away):
        return None

    def at(name: str) -> Callable[[float], Tensor]:
        return lambda factor: torch.stack([one.at[name](factor) for _, one in kept])

    names = kept[0][1].at
    return Gaps(
        regions=tuple(part.region for part, _ in kept),
        offered=offered,
        none=at(next(iter(names)))(0.0),  # at distance 0 every adjustment gives back the base posterior
        at={name: at(name) for name in names},
        unit=1 / float(away.median()),
    )


def _part(train: Labelled, region: Region, generator: torch.Generator, weights: Tensor | None) -> _Part:
    device = train.x.device
    rest = region.rest[torch.randperm(len(region.rest), generator=generator)]
    count = max(round(ORDINARY * len(rest)), FEWEST_ORDINARY)
    missing = region.missing[torch.randperm(len(region.missing), generator=generator)[:MOST_READ]]
    rows = (missing, rest[:count], rest[count : count + MOST_KEPT])
    single = train._replace(x=train.x.float(), y=train.y.float() if train.y.is_floating_point() else train.y)
    missing_rows, ordinary, kept = (single.subset(index.to(device)) for index in rows)
    return _Part(region, missing_rows, ordinary, kept, None if weights is None else weights[rows[2].to(weights.device)])


def _refits(
    task: Task, posterior: Posterior, parts: list[_Part], progress: Callable[[int, int], None]
) -> list[Posterior]:
    """A posterior of the recipe's kind for each region, its networks trained side by side."""
    recipe = task.recipe
    rows = len(parts[0].kept.x)
    if task.brought is not None:
        return _brought(task, posterior, task.brought, parts, progress)
    batch_size, epochs = schedule_of(recipe, rows)
    members, shorter = members_of(recipe), SHARING_SHORTER if recipe.posterior == "tabm" else SHORTER
    if rows > WHOLE:
        members = min(members, MEMBERS)
    if recipe.epochs is None and (rows > WHOLE or recipe.posterior == "tabm"):
        epochs = round(shorter * epochs)
    patience = max(round(PATIENCE * epochs), 1)
    kept, ordinary = ([getattr(part, name) for part in parts] for name in ("kept", "ordinary"))
    if recipe.posterior == "tabm":
        return _sharing(task, parts, batch_size, epochs, patience, progress)
    started = ensemble.fit_each(
        task.make_for(kept[0]),
        task.likelihood,
        kept,
        ordinary,
        members=members,
        prior_scale=recipe.prior_scale,
        seed=recipe.seed + 1,  # its first member is no member of the posterior itself
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=recipe.learning_rate,
        patience=patience,
        row_weights=_weights(parts),
        progress=progress,
    )
    return [_around(task, part, one, epochs, patience) for part, one in zip(parts, started, strict=True)]


def _brought(
    task: Task, posterior: Posterior, brought: Brought, parts: list[_Part], progress: Callable[[int, int], None]
) -> list[Posterior]:
    """Estimators fitted to the rows that are kept; where these are of one class, which is not read, the posterior."""
    recipe, found = task.recipe, list[Posterior]()
    for place, part in enumerate(parts):
        progress(place, len(parts))
        members = recipe.members if len(part.kept.x) <= WHOLE else min(recipe.members, MEMBERS)
        varies = len(part.kept.y.unique(dim=0)) > 1
        own = brought.fit(part.kept, members=members, seed=recipe.seed + 1, weights=part.weights) if varies else None
        found.append(own or posterior)
    progress(len(parts), len(parts))
    return found


def _sharing(
    task: Task, parts: list[_Part], batch_size: int, epochs: int, patience: int, progress: Callable[[int, int], None]
) -> list[Posterior]:
    """Members that share weights, with bins from the rows that are kept."""
    recipe, kept = task.recipe, [part.kept for part in parts]
    found = sharing.fit_each(
        [task.make_for(rows) for rows in kept],
        task.likelihood,
        kept,
        [part.ordinary for part in parts],
        row_weights=_weights(parts),
        own=TableNetwork.is_own,
        members=min(recipe.members, SHARING),
        weight_decay=recipe.weight_decay,
        seed=recipe.seed + 1,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=recipe.learning_rate,
        patience=patience,
        progress=lambda epoch: progress(epoch.number, epoch.total),
    )
    return list(found)


def _weights(parts: list[_Part]) -> list[Tensor] | None:
    found = [part.weights for part in parts if part.weights is not None]
    return found or None


def _around(task: Task, part: _Part, one: NetworkPosterior, epochs: int, patience: int) -> Posterior:
    watched = (part.ordinary.x, part.ordinary.y)
    own = task._replace(
        train=(part.kept.x, part.kept.y),
        watched=watched,
        weights=part.weights,
        options={**task.options, "epochs": epochs, "patience": patience, "held_out": watched, "progress": False},
    )
    return around(own, one)


def _with_noise_of(posterior: Posterior, refit: Posterior) -> Posterior:
    """A refit whose noise goes with the row as the posterior's does; its level is scaled by ordinary rows.

    The posterior's noise is read off held-out rows. The one that short training ends with may be ten times as large, so
    that nothing seems to be gained by doubting more.
    """
    if not isinstance(posterior.likelihood, NormalLikelihood):
        return refit
    return with_likelihood(refit, posterior.likelihood)


class _Found(NamedTuple):
    """One region, read."""

    at: dict[str, Callable[[float], Tensor]]
    away: Tensor  # pre-distances beyond 0, in prior scales


def _found(
    part: _Part,
    posterior: Posterior,
    offered: Mapping[str, Adjustment],
    spaces: tuple[Space, ...],
    scaled: bool,
    share: float,
) -> _Found | None:
    if len(part.kept.y.unique(dim=0)) < 2:  # all that vary were left out
        return None
    if scaled:
        posterior = in_domain(posterior, part.ordinary)
    posterior = as_narrow(posterior, share)
    try:
        d0 = fit_distance(spaces, part.kept.x, part.ordinary.x, posterior, part.kept.y)(part.missing.x)
    except NothingToCalibrate:  # all ordinary rows have a twin among those that are kept
        return None
    likelihood, y = posterior.likelihood, part.missing.y

    def read(adjust: Adjustment) -> Callable[[float], Tensor]:
        adjusted = adjust.fitted(likelihood, part.kept.y)(posterior, part.missing.x)
        return lambda factor: likelihood.log_prob(adjusted(factor * d0), y).double().mean().cpu()

    lead = 1.0 if posterior.prior is None else posterior.prior.lead
    away = lead * d0[d0 > 0].double().cpu()
    return _Found({name: read(adjust) for name, adjust in offered.items()}, away)
