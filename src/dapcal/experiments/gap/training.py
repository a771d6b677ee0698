"""Networks trained on gap splits: every learning rate, number of epochs and ensemble member, and the choice among them.

The splits of a data set are of one size, so all of its networks learn at once (`batched`), and the numbers of epochs
are read off one run. Held-out log-likelihood chooses; the gap itself is never looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dapcal.experiments.datasets import TABLES, Table, uci
from dapcal.experiments.gap.batched import Network, Trained, fit_map, fit_variational, layout_for, outputs
from dapcal.likelihoods.normal import log_normal


@dataclass(frozen=True)
class Plan:
    """The experiment as data.

    Attributes:
        tables: names of the data sets.
        load: from a name to the data set with its gap splits.
        rates: learning rates that are tried.
        paper_rates: those that the paper tried.
        untuned_rate: learning rate of one more variational posterior, trained the longest, with nothing chosen.
        epochs: numbers of epochs that are tried.
        hidden: widths of the hidden layers.
        batch_size: of the minibatches.
        members: of the ensembles.
        draws: of the posteriors.
        held_out: share of the rows outside the gap that chooses and calibrates.
        together: splits that are trained as one batched network; more fall out of the processor's cache.
    """

    tables: tuple[str, ...] = TABLES
    load: Callable[[str], Table] = uci
    rates: tuple[float, ...] = (1e-2, 1e-3, 1e-4, 1e-5)
    paper_rates: tuple[float, ...] = (1e-2, 1e-4, 1e-5)
    untuned_rate: float = 1e-3
    epochs: tuple[int, ...] = (20, 40, 100, 200)
    hidden: tuple[int, ...] = (50, 50)
    batch_size: int = 64
    members: int = 5
    draws: int = 100
    held_out: float = 0.1
    together: int = 4

    @property
    def settings(self) -> dict[str, Any]:
        """For the result file."""
        return {
            "network": "-".join(["D", *map(str, self.hidden), "1"]) + " ReLU", "sigma0": 1.0, "kl_weight": 1.0,
            "initial_scale": 0.02, "learning_rates": self.rates, "paper_learning_rates": self.paper_rates,
            "untuned_learning_rate": self.untuned_rate,
            "epochs": self.epochs, "batch_size": self.batch_size, "members": self.members, "draws": self.draws,
            "held_out": self.held_out, "trained_together": self.together,
        }  # fmt: skip


class Part(NamedTuple):
    """Standardised inputs and targets."""

    x: Tensor  # (N, D)
    y: Tensor  # (N, 1)


class Split(NamedTuple):
    """One gap: what networks learn, what chooses among them, and the gap itself, in the units of the training part."""

    train: Part
    held_out: Part
    test: Part
    scale: float  # of the target in its own units


class Setting(NamedTuple):
    """A point of the grid: places in the plan's rates and epochs."""

    rate: int
    epochs: int


Networks = dict[str, Tensor]
"""Trained networks by method and value, e.g. "map.mean": (splits, rates, members, epochs, P), or without splits."""


def prepare(plan: Plan, table: Table, split: int, seed: int) -> Split:
    """Hold out a tenth of the rows outside the gap, and standardise by the others (constant columns keep scale 1)."""
    test = table.splits[split]
    outside = torch.ones(len(table.x), dtype=torch.bool)
    outside[test] = False
    rows = outside.nonzero().flatten()
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]
    number = round(plan.held_out * len(rows))
    held_out, train = rows[:number], rows[number:]
    x, y = _standard(table.x, train), _standard(table.y[:, None], train)
    learnt, chosen_by, gap = (Part(x[index], y[index]) for index in (train, held_out, test))
    return Split(learnt, chosen_by, gap, float(table.y[train].std(correction=0)))


def train(plan: Plan, splits: Sequence[Split], numbers: Sequence[int], seed: int) -> Networks:
    """MAP networks, and mean-field posteriors from scratch and from the MAP network that held-out data choose.

    Args:
        plan: the grid.
        splits: of one data set.
        numbers: the splits' numbers, of which (with `seed`) the networks' seeds are made.
        seed: of the experiment.
    """
    x = torch.stack([split.train.x for split in splits])
    y = torch.stack([split.train.y[:, 0] for split in splits])
    options: dict[str, Any] = {"hidden": plan.hidden, "epochs": plan.epochs, "batch_size": plan.batch_size}

    def networks(members: int) -> list[Network]:
        return [
            Network(data, rate, (1000 * seed + number) * plan.members + member)
            for data, number in enumerate(numbers) for rate in plan.rates for member in range(members)
        ]  # fmt: skip

    shape = (len(splits), len(plan.rates), plan.members)
    points = _named("map", fit_map(x, y, networks(plan.members), **options), shape)
    scratch = _named("scratch", fit_variational(x, y, networks(1), **options), shape[:2])
    best = []
    for place, split in enumerate(splits):
        own = {name: value[place] for name, value in points.items()}
        rate, epochs = choose(plan, score_map(plan, own, split.held_out))
        best += [Trained(own["map.mean"][rate, 0, epochs], own["map.log_noise"][rate, 0, epochs])] * len(plan.rates)
    start = Trained(torch.stack([one.mean for one in best]), torch.stack([one.log_noise for one in best]))
    posteriors = _named("variational", fit_variational(x, y, networks(1), start=start, **options), shape[:2])
    return points | scratch | posteriors


def choose(plan: Plan, scores: Tensor, rates: Sequence[float] | None = None) -> Setting:
    """The best of some learning rates and all epochs by held-out log-likelihoods (rates, epochs)."""
    allowed = torch.tensor([rates is None or rate in rates for rate in plan.rates])
    masked = torch.where(allowed[:, None], scores.nan_to_num(-math.inf), -math.inf)
    return Setting(*divmod(int(masked.argmax()), scores.shape[1]))


def score_map(plan: Plan, networks: Networks, data: Part) -> Tensor:
    """Mean log density of the first member, (rates, epochs)."""
    located = _located(plan, networks["map.mean"][:, 0], data)
    return log_normal(data.y[:, 0], located, _variance(networks["map.log_noise"][:, 0])).mean(-1)


def score_ensemble(plan: Plan, networks: Networks, data: Part) -> Tensor:
    """Mean log density of the moments of all members, (rates, epochs)."""
    located = _located(plan, networks["map.mean"], data)  # (rates, members, epochs, N)
    variance = _variance(networks["map.log_noise"]).mean(1) + located.var(1, correction=0)
    return log_normal(data.y[:, 0], located.mean(1), variance).mean(-1)


def score_variational(plan: Plan, networks: Networks, data: Part, method: str, seed: int) -> Tensor:
    """Mean log density of the moments of draws, (rates, epochs), for the method "variational" or "scratch"."""
    mean, scale = networks[f"{method}.mean"], networks[f"{method}.log_scale"].exp()
    noise = torch.randn(plan.draws, mean.shape[-1], generator=torch.Generator().manual_seed(seed))
    pairs = zip(mean.flatten(0, 1), scale.flatten(0, 1), strict=True)  # one at a time: memory of all draws of one
    located = torch.stack([_located(plan, m + s * noise, data) for m, s in pairs]).unflatten(0, mean.shape[:2])
    variance = _variance(networks[f"{method}.log_noise"]) + located.var(2, correction=0)
    return log_normal(data.y[:, 0], located.mean(2), variance).mean(-1)


def _located(plan: Plan, weights: Tensor, data: Part) -> Tensor:
    """Outputs (..., N) of weight vectors (..., P), in float64."""
    flat = weights.flatten(0, -2)
    layout = layout_for(data.x.shape[1], plan.hidden)
    return outputs(layout, flat, data.x.expand(len(flat), -1, -1)).double().unflatten(0, weights.shape[:-1])


def _variance(log_noise: Tensor) -> Tensor:
    """Noise variances (..., 1), in float64."""
    return (2 * log_noise.double()).exp()[..., None]


def _standard(values: Tensor, rows: Tensor) -> Tensor:
    """Columns of mean 0 and variance 1 on some rows, in float32."""
    center, scale = values[rows].mean(0), values[rows].std(0, correction=0)
    return ((values - center) / torch.where(scale > 0, scale, 1)).float()


def _named(method: str, snapshots: dict[int, Trained], shape: tuple[int, ...]) -> Networks:
    """Snapshots side by side, the networks (M,) in the given shape."""
    some = next(iter(snapshots.values()))
    names = [name for name, value in some._asdict().items() if value is not None]
    stacked = {name: torch.stack([getattr(one, name) for one in snapshots.values()], 1) for name in names}
    return {f"{method}.{name}": value.unflatten(0, shape) for name, value in stacked.items()}
