"""Deep ensembles: networks trained on their own, from initial weights of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn

from dapcal.data import Data, Labelled, in_memory
from dapcal.engines import Engine, named
from dapcal.engines.engine import in_order
from dapcal.likelihoods import Gaussian, Likelihood
from dapcal.networks import plain, reading, take
from dapcal.posteriors import map as map_posterior
from dapcal.posteriors import samples
from dapcal.posteriors._training import batched
from dapcal.posteriors._training.checks import check
from dapcal.posteriors.network import NetworkPosterior
from dapcal.posteriors.training import Options
from dapcal.progress import Bar

TOGETHER = (
    2**20
)  # weights trained side by side, about; what does not fit a processor's cache waits for memory at each step


def fit(
    make: Callable[[], nn.Module],
    likelihood: Likelihood,
    train: Data,
    *,
    members: int = 5,
    prior_scale: float | Mapping[str, float] = 1.0,
    seed: int = 0,
    folder: str | Path | None = None,
    engine: Engine | str = "local",
    **options: Unpack[Options],
) -> NetworkPosterior:
    """Train M networks by `dapcal.posteriors.map.fit`, each from initial weights and batches of its own.

    A draw is a member, with its own batch-norm statistics. σ0 is a penalty here and says nothing of the members'
    spread, so the posterior has no prior: Inflate needs none, and `posterior.with_prior(...)` sets one for Reweight.
    Noise levels that Gaussian members have learnt are pooled as their root mean square, what other likelihoods have
    learnt as its mean. Lakshminarayanan, Pritzel, Blundell (2017), arXiv:1612.01474.

    Args:
        make: returns a new network; called under the seed of its member.
        likelihood: p(y | outputs).
        train: (inputs, targets), a Dataset or a DataLoader.
        members: M.
        prior_scale: σ0, one or by name pattern.
        seed: member m has seed · M + m, so that ensembles of one size with other seeds share no member.
        folder: holds a checkpoint of each member (member-0, member-1, …), from which an interrupted call goes on.
        engine: where members are trained: "local", or "ray", each as a call on a node of a cluster; they are the same.
        options: epochs, learning rate and all else of `dapcal.posteriors.training.Training`, but `checkpoint`. A
            function `progress` gets the epochs of one member after the other.
    """
    if isinstance(make, nn.Module) or not callable(make):
        raise TypeError(
            f"Expected `make` as a function that returns a new network, got {type(make).__name__}; pass e.g. "
            "lambda: Net(), or ensemble.of(models, likelihood) for networks that are trained already"
        )
    if members < 1:
        raise ValueError(f"Expected `members` >= 1, got {members}")
    if options.get("checkpoint") is not None:
        raise ValueError("Every member has a checkpoint of its own; give their `folder` in place of `checkpoint`")
    if engine != "local" and options.get("progress"):
        raise ValueError("Members that are trained elsewhere tell no progress; leave `progress` out")
    first = _made(make, seed * members)
    _, fields, taken = take(first, {"train": train, "held_out": options.get("held_out")}, loaders=True)
    source, options["held_out"] = in_memory(taken["train"], "train"), taken["held_out"]  # for all members

    def member(first: nn.Module, number: int) -> tuple[nn.Module, Likelihood]:
        own: Options = {**options}
        if folder is not None:
            own["checkpoint"] = Path(folder) / f"member-{number}"
        if options.get("progress") is True:
            own["progress"] = Bar(f"member {number + 1}/{members}")
        alone = seed * members + number
        network = reading(plain(_made(make, alone) if number else first), fields)
        found = map_posterior.fit(network, likelihood, source, prior_scale=prior_scale, seed=alone, **own)
        return found.network, found.likelihood

    trained = in_order(named(engine), first, member, range(members))
    return of([network for network, _ in trained], pooled([own for _, own in trained]))


def fit_each(
    make: Callable[[], nn.Module],
    likelihood: Likelihood,
    train: Sequence[Labelled],
    held_out: Sequence[Labelled] | None,
    *,
    members: int = 5,
    prior_scale: float = 1.0,
    seed: int = 0,
    epochs: int = 100,
    batch_size: int = 128,
    learning_rate: float = 1e-3,
    patience: int | None = None,
    last: int | None = None,
    row_weights: Sequence[Tensor] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,  # noqa: ARG005
) -> list[NetworkPosterior]:
    """An ensemble for each of several training sets, networks side by side: what `fit` gives for one, but faster.

    Large networks are trained side by side in groups of ensembles (up to rounding and the masks of dropout the same).

    Args:
        make: returns a new network, a chain of linear layers and elementwise functions; called under a member's seed.
        likelihood: p(y | outputs).
        train: training sets of one size, targets as the likelihood wants them.
        held_out: for each of them rows, of one number too, by whose NLL every member stays at its best epoch; None: it
            stays at the last one.
        members: M, of every ensemble.
        prior_scale: σ0.
        seed: ensemble j is that of seed + j, as `fit` counts them.
        epochs: passes over the data, at most.
        batch_size: of every network.
        learning_rate: at the start.
        patience: epochs without a lower NLL after which a member stops.
        last: epoch with which training ends, before the learning rate is zero.
        row_weights: of the rows of every training set.
        progress: told how many epochs of how many are done.
    """
    model = make()
    size = members * sum(parameter.numel() for parameter in model.parameters())
    together = max(TOGETHER // max(size, 1), 1)
    found = []
    for first in range(0, len(train), together):
        group = slice(first, min(first + together, len(train)))
        places = range(group.start, group.stop)
        seeds = [(place - first, (seed + place) * members + m) for place in places for m in range(members)]
        learnt = batched.train(
            [batched.Run(place, _made(make, own), own) for place, own in seeds],
            likelihood,
            train[group],
            held_out and held_out[group],
            epochs=epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            prior_scale=prior_scale,
            patience=patience,
            last=last,
            row_weights=row_weights and row_weights[group],
            progress=_within(progress, group, len(train)),
        )
        for start in range(0, len(seeds), members):
            own = slice(start, start + members)
            stacked = learnt.layout.unflatten(learnt.weights[own])
            found.append(samples.from_stacked(model, pooled(learnt.likelihoods[own]), stacked))
    return found


def _within(progress: Callable[[int, int], None], group: slice, count: int) -> Callable[[int, int], None]:
    """Tell of a group of ensembles what it is of all."""

    def tell(done: int, total: int) -> None:
        progress((group.start * total + (group.stop - group.start) * done) // count, total)

    return tell


def of(models: Sequence[nn.Module], likelihood: Likelihood) -> NetworkPosterior:
    """Trained networks of one architecture as an ensemble; `posterior.network` is the first.

    Args:
        models: the members; copied.
        likelihood: p(y | outputs), one for all of them.
    """
    if isinstance(models, nn.Module) or not models or not all(isinstance(m, nn.Module) for m in models):
        kinds = type(models).__name__ if isinstance(models, nn.Module) else [type(m).__name__ for m in models]
        raise TypeError(f"Expected `models` as a list of trained networks, got {kinds}")
    check(models[0], likelihood)
    models = [plain(model) for model in models]
    states = [model.state_dict() for model in models]
    shapes = [{name: tuple(value.shape) for name, value in state.items()} for state in states]
    for number, other in enumerate(shapes):
        odd = sorted(n for n in shapes[0].keys() | other.keys() if shapes[0].get(n) != other.get(n))
        if odd:
            raise ValueError(
                f"Expected networks of one architecture, but {odd[:4]} differ between the first and number {number}; "
                "wrap networks of several architectures in dapcal.posteriors.predictions.StackedPredictions"
            )
    device = next(iter(states[0].values())).device
    moved = [{name: value.to(device) for name, value in state.items()} for state in states]
    return samples.from_state_dicts(models[0], likelihood, moved)


def pooled(likelihoods: Sequence[Likelihood]) -> Likelihood:
    """One likelihood for all members: noise levels by their root mean square, else the mean of what was learnt.

    >>> round(pooled([Gaussian(1.0), Gaussian(7.0)]).noise, 4)
    5.0
    """
    first = likelihoods[0]
    learnt = {name: torch.stack([own.free()[name] for own in likelihoods]) for name in first.free()}
    if isinstance(first, Gaussian):  # its free value is the log of the noise level
        return first.at({name: (2 * value).exp().mean(0).log() / 2 for name, value in learnt.items()})
    return first.at({name: value.mean(0) for name, value in learnt.items()})


def _made(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A new network, from a seed; the global generators are given back as they were."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        model = make()
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected `make` to return a network, got {type(model).__name__}")
    return model
