"""Which spaces count: a distance is evidence only where it is informative.

In pixel space smooth images are near everything, and SVHN lies nearer to CIFAR-10 than CIFAR-10's own test images. So
a space is used where its distance predicts the model's own errors on held-out inputs, or where simple synthetic
outliers come out farther than held-out inputs: at least one kind clearly, and none nearer.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.data import Labelled
from dapcal.distances.outliers import synthetic
from dapcal.distances.projectors import Features, Identity, LayerFeatures
from dapcal.distances.radius import fit_radius
from dapcal.distances.spaces import Distance, FittedSpace, Space, fit_distance
from dapcal.ensembles import Evaluated, seen
from dapcal.errors import NothingToCalibrate
from dapcal.hardest import FEWEST, hardest
from dapcal.likelihoods import Likelihood
from dapcal.networks import execution_order
from dapcal.ranks import auroc, ranks_of
from dapcal.types import DapcalWarning, Ensemble, Posterior

LARGEST_INPUT = 4096  # numbers; beyond that distances between raw inputs are not tried
THRESHOLD = 0.6  # AUROC from which a space counts as informative
_PROBES = 1000  # held-out inputs that the tests look at


class Measured(NamedTuple):
    """Spaces that count, and fitted; further ones as evidence for the OOD score; what was found, in words."""

    spaces: tuple[Space, ...]
    distance: Distance
    further: tuple[FittedSpace, ...]
    notes: tuple[str, ...]


def measure(
    distance: Space | Sequence[Space] | Measured | None, posterior: Posterior, train: Tensor, held_out: Evaluated
) -> Measured:
    """The spaces that were asked for, fitted; by default those that are informative."""
    if isinstance(distance, Measured):
        return distance
    if distance is None:
        return informative(posterior, train, Labelled(held_out.x, held_out.y), base=held_out.base)
    several = (distance,) if isinstance(distance, Space) else distance
    if not isinstance(several, tuple | list) or not all(isinstance(space, Space) for space in several):
        raise TypeError(
            f"Expected `distance` as a dapcal.distances.Space or several, got {type(distance).__name__}; wrap a "
            "projector in Space(projector)"
        )
    return Measured(tuple(several), fit_distance(several, train, held_out.x, posterior), (), ())


def informative(
    posterior: Posterior,
    train: Tensor,
    held_out: Labelled,
    radius: float | None = 0.9,
    base: Ensemble | None = None,
) -> Measured:
    """The default distance: features and inputs, each only where it is informative.

    Args:
        posterior: whose network gives the features.
        train: training inputs.
        held_out: in-distribution data that the posterior was not fitted to.
        radius: quantile of held-out distances inside which d0 = 0.
        base: what the posterior says of the held-out inputs, where that is known already.
    """
    base = seen(posterior, held_out.x, drawn=True) if base is None else base
    candidates = _candidates(posterior, train, radius)
    errors = _errors(posterior.likelihood, Evaluated(held_out.x, held_out.y, base))
    outliers = synthetic(train, held_out.x[:_PROBES])
    found: list[tuple[float, Space, FittedSpace]] = []
    raws: dict[str, Tensor] = {}
    notes = []
    for space in candidates:
        fitted = Space(space.projector, space.metric, None, space.name).fit(train, held_out.x, posterior)
        if isinstance(fitted.projector, LayerFeatures) and fitted.projector.pool:
            notes.append(
                f"features: what enters the convolution `{fitted.projector.layer}`, averaged over places (the network "
                "has no linear layer)"
            )
        raw = fitted.raw(held_out.x)
        own = _errors_predicted(raw, errors)
        inside = raw[:_PROBES]
        separated = {kind: auroc(fitted.raw(x), inside) for kind, x in outliers.items()}
        worst = min(separated.values())
        by_outliers = worst if worst < _nearer(len(inside)) else max(separated.values())
        if radius is not None and not raw.any():
            notes.append(f"distance between {space.name}: 0 at all held-out inputs, not used")
            continue
        found.append((max(own, by_outliers), space, fitted))
        raws[space.name] = raw
        outcome = ", ".join(f"{kind} {value:.2f}" for kind, value in separated.items())
        notes.append(
            f"distance between {space.name}: AUROC {own:.2f} for the model's own errors; for synthetic outliers "
            f"{outcome}"
        )
    if not found:
        raise NothingToCalibrate(
            "All held-out inputs have distance 0 to the training inputs in every space; hold out inputs that are not "
            "in the training set"
        )
    chosen = [entry for entry in found if entry[0] >= THRESHOLD]
    if not chosen:
        chosen = [max(found, key=lambda entry: entry[0])]
        warnings.warn(
            f"No distance is informative on held-out inputs ({'; '.join(notes)}); using {chosen[0][1].name} all the "
            "same. Give a better projector with distance=Space(projector=...)",
            DapcalWarning,
            stacklevel=4,
        )
    notes.append(f"distances used: {', '.join(space.name for _, space, _ in chosen)}")
    further: tuple[FittedSpace, ...] = ()
    if any(isinstance(space.projector, Features) for _, space, _ in chosen):
        unit = Space(Features(unit=True), radius=None, name="normalised features")
        further = (unit.fit(train, held_out.x, posterior),)
    return Measured(
        spaces=tuple(space for _, space, _ in chosen),
        distance=Distance(tuple(_with_radius(fitted, raws[fitted.name], radius) for _, _, fitted in chosen)),
        further=further,
        notes=tuple(notes),
    )


def _with_radius(space: FittedSpace, raw: Tensor, radius: float | None) -> FittedSpace:
    return space if radius is None else replace(space, radius=fit_radius(raw, radius, space.name))


def _nearer(n: int) -> float:
    """AUROC under which n outliers are nearer than n held-out inputs, by more than two standard errors."""
    return 0.5 - max(0.05, 2 * ((2 * n + 1) / (12 * n**2)) ** 0.5)


def _candidates(posterior: Posterior, train: Tensor, radius: float | None) -> list[Space]:
    spaces = []
    if posterior.network is not None:
        try:
            layer = Features().fit_projector(train, posterior).layer
        except ValueError:  # no layer that would do: inputs alone
            layer = None
        first = layer is not None and _runs_first(posterior.network, layer, train[:1])
        if layer is not None and not first:  # what enters the first layer are the inputs
            spaces.append(Space(Features(), radius=radius, name="features"))
    if not spaces or (train[0].numel() <= LARGEST_INPUT and train.is_floating_point()):
        spaces.append(Space(Identity(), radius=radius, name="inputs"))
    return spaces


def _runs_first(network: torch.nn.Module, layer: str, x: Tensor) -> bool:
    """Whether no other module with parameters runs before `layer`."""
    with_parameters = {n: m for n, m in network.named_modules() if any(True for _ in m.parameters(False))}
    return execution_order(network, with_parameters, x)[0] == layer


def _errors(likelihood: Likelihood, held_out: Evaluated) -> Tensor:
    """How wrong the base posterior is, (N,); where wrong classes are too few (or right ones), the hardest inputs."""
    error = likelihood.error(held_out.base, held_out.y.to(held_out.base.outputs.device))
    if error.dtype != torch.bool or FEWEST <= int(error.sum()) <= len(error) - FEWEST:
        return error
    return torch.zeros_like(error).index_fill(0, hardest(likelihood, held_out).to(error.device), True)


def _errors_predicted(raw: Tensor, error: Tensor) -> float:
    """AUROC of the distance for errors; of numbers (1 + rank correlation with |error|)/2."""
    error = error.to(raw.device)
    if error.dtype == torch.bool:
        return auroc(raw[error], raw[~error]) if error.any() and not error.all() else 0.5
    ranks = torch.stack([ranks_of(raw), ranks_of(error)])
    if ranks.shape[1] < 3 or not (ranks.var(1) > 0).all():
        return 0.5
    return float((1 + torch.corrcoef(ranks)[0, 1]) / 2)
