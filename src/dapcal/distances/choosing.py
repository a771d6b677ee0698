"""Which spaces count: a distance is evidence only where it is informative (`dapcal.distances.verdicts` says when)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dapcal.data import Labelled
from dapcal.distances.class_gaussian import ClassGaussian
from dapcal.distances.metrics import nearest
from dapcal.distances.outliers import synthetic
from dapcal.distances.projectors import Features, Identity, LayerFeatures, project
from dapcal.distances.radius import check_measurable, fit_radius
from dapcal.distances.spaces import Distance, FittedSpace, Space, fit_distance, indexes_in_words
from dapcal.distances.twins import notice
from dapcal.distances.verdicts import errors_predicted, farther, verdict
from dapcal.ensembles import Evaluated, seen
from dapcal.errors import NothingToCalibrate
from dapcal.hardest import FEWEST, hardest
from dapcal.likelihoods import ClassLikelihood, Likelihood
from dapcal.networks import execution_order, reads, shared
from dapcal.posteriors.network import NetworkPosterior
from dapcal.types import DapcalWarning, Ensemble, Metric, Posterior

LARGEST_INPUT = 4096  # numbers; beyond that distances between raw inputs are not tried
LARGEST_COVARIANCE = 2048  # features; beyond that their covariance (32 MiB) is not tried
_PROBES = 1000  # held-out inputs that the tests look at


class Measured(NamedTuple):
    """Spaces that count, and fitted; further ones as evidence for the OOD score; what was found, in words.

    Where no space counts there are none here, and the distance of all inputs is 0.
    """

    spaces: tuple[Space, ...]
    distance: Distance
    further: tuple[FittedSpace, ...]
    notes: tuple[str, ...]


def measure(
    distance: Space | Sequence[Space] | Measured | None,
    posterior: Posterior,
    train: Tensor,
    held_out: Evaluated,
    targets: Tensor | None = None,
) -> Measured:
    """The spaces that were asked for, fitted; by default those that are informative."""
    if isinstance(distance, Measured):
        return distance
    if distance is None:
        return informative(posterior, train, Labelled(held_out.x, held_out.y), base=held_out.base, targets=targets)
    several = (distance,) if isinstance(distance, Space) else distance
    if not isinstance(several, tuple | list) or not all(isinstance(space, Space) for space in several):
        raise TypeError(
            f"Expected `distance` as a dapcal.distances.Space or several, got {type(distance).__name__}; wrap a "
            "projector in Space(projector)"
        )
    fitted = fit_distance(several, train, held_out.x, posterior, targets)
    notice([(space, space.raw(held_out.x)) for space in fitted.spaces], train)
    return Measured(tuple(several), fitted, (), indexes_in_words(fitted.spaces))


def informative(
    posterior: Posterior,
    train: Tensor,
    held_out: Labelled,
    radius: float | None = 0.9,
    base: Ensemble | None = None,
    targets: Tensor | None = None,
    metric: Callable[[Tensor], Metric] = nearest,
) -> Measured:
    """The default distance: features and inputs, each only where it is informative.

    Distances between normalised features, and of classes from those to the nearest class mean (`ClassGaussian`), are
    further evidence for the OOD score, by the same rule; the first of them takes the place of the distance where
    features and inputs are both out. If nothing is in, there is no distance, and a warning says so.

    Args:
        posterior: whose network gives the features.
        train: training inputs.
        held_out: in-distribution data that the posterior was not fitted to.
        radius: quantile of held-out distances inside which d0 = 0.
        base: what the posterior says of the held-out inputs, where that is known already.
        targets: of the training inputs, for the distance to the nearest class.
        metric: of all spaces but that one, e.g. `partial(nearest, index=Coreset(1000))`.
    """
    base = seen(posterior, held_out.x, drawn=True) if base is None else base
    errors = _errors(posterior.likelihood, Evaluated(held_out.x, held_out.y, base))
    tried, notes = _tried(posterior, train, held_out.x, radius, targets, metric)
    moving = [one for one in tried if one.raw.any() or (radius is None and one.is_distance)]
    if not any(one.is_distance for one in moving):
        raise NothingToCalibrate(
            "All held-out inputs have distance 0 to the training inputs in every space; hold out inputs that are not "
            "in the training set"
        )
    notice([(one.fitted, one.raw) for one in tried if one.is_distance], train)
    kept: list[_Tried] = []
    for one in tried:
        if one not in moving:
            notes.append(f"distance between {one.space.name}: 0 at all held-out inputs, not used")
            continue
        inside = one.raw[:_PROBES]
        found = verdict(
            errors_predicted(one.raw, errors), {kind: farther(raw, inside) for kind, raw in one.outliers.items()}
        )
        notes.append(f"distance between {one.space.name}: {found.words}")
        kept += [one] if found.counts else []
    chosen = [one for one in kept if one.is_distance] or kept[:1]
    if not chosen:
        warnings.warn(
            f"No distance is informative on held-out inputs ({'; '.join(notes)}): predictions are left as they are, "
            "and the OOD score is the model's own doubt alone. Give a better projector with "
            "distance=Space(projector=...)",
            DapcalWarning,
            stacklevel=4,
        )
    further = [one for one in kept if not one.is_distance and one not in chosen]
    if further:
        notes.append(f"further evidence: {', '.join(one.space.name for one in further)}")
    notes.append(f"distances used: {', '.join(one.space.name for one in chosen) or 'none, no space is informative'}")
    notes += indexes_in_words([one.fitted for one in (*chosen, *further)])
    return Measured(
        spaces=tuple(replace(one.space, radius=radius) for one in chosen),
        distance=Distance(tuple(_with_radius(one.fitted, one.raw, radius) for one in chosen)),
        further=tuple(one.fitted for one in further),
        notes=tuple(notes),
    )


@dataclass(frozen=True, eq=False)
class _Tried:
    """A space that may count, and what was measured in it."""

    space: Space
    fitted: FittedSpace  # without radius
    is_distance: bool  # else evidence for the OOD score alone
    raw: Tensor  # of the held-out inputs, (N,)
    outliers: dict[str, Tensor]  # raw distances of each kind


def _tried(
    posterior: Posterior,
    train: Tensor,
    held_out: Tensor,
    radius: float | None,
    targets: Tensor | None,
    metric: Callable[[Tensor], Metric],
) -> tuple[list[_Tried], list[str]]:
    """Every candidate, fitted and measured, and what is to be said of it; each network runs once an input."""
    distances = [replace(space, metric=metric) for space in _candidates(posterior, train, radius)]
    with shared(posterior.network, train), shared(posterior.network, held_out):
        candidates = [*distances, *_further(distances, posterior, train, targets)]
        fitted = [replace(space, radius=None).fit(train, held_out, posterior, targets) for space in candidates]
        inside = [space.raw(held_out) for space in fitted]
    for space, raw in zip(distances, inside[: len(distances)], strict=True):
        check_measurable(raw, space.name)
    outside = {}
    for kind, x in synthetic(train, held_out[:_PROBES], reads(posterior.network)).items():
        with shared(posterior.network, x):
            outside[kind] = [space.raw(x) for space in fitted]
    tried = [
        _Tried(space, fitted[i], i < len(distances), inside[i], {kind: raws[i] for kind, raws in outside.items()})
        for i, space in enumerate(candidates)
    ]
    notes = [
        f"features: what enters the convolution `{space.projector.layer}`, averaged over places (the network has no "
        "linear layer)"
        for space in fitted[:1]
        if isinstance(space.projector, LayerFeatures) and space.projector.pool
    ]
    return tried, notes


def _with_radius(space: FittedSpace, raw: Tensor, radius: float | None) -> FittedSpace:
    return space if radius is None else replace(space, radius=fit_radius(raw, radius, space.name))


def _candidates(posterior: Posterior, train: Tensor, radius: float | None) -> list[Space]:
    spaces = []
    if posterior.network is not None:
        try:
            projector = Features().fit_projector(train, posterior)
        except ValueError:  # no layer that would do: inputs alone
            projector = None
        first = projector is not None and _runs_first(posterior.network, projector.layer, train[:1])
        if projector is not None and not first:  # what enters the first layer are the inputs
            members = not projector.pool and _features_differ(posterior, projector.layer, train[:2])
            spaces.append(Space(Features(members=members), radius=radius, name="features"))
    fields = reads(posterior.network)
    if fields is not None and not spaces:
        raise ValueError(
            f"Found no features of this network, and inputs of several fields {list(fields.names)} have no distance; "
            "name a layer: distance=Space(Features(layer=...))"
        )
    if not spaces or (train[0].numel() <= LARGEST_INPUT and train.is_floating_point() and fields is None):
        spaces.append(Space(Identity(), radius=radius, name="inputs"))
    return spaces


def _further(distances: list[Space], posterior: Posterior, train: Tensor, targets: Tensor | None) -> list[Space]:
    """Spaces that may be evidence beside the distance: those of features, where the distance has them."""
    plain = next((space.projector for space in distances if isinstance(space.projector, Features)), None)
    if plain is None:
        return []
    unit = replace(plain, unit=True)
    spaces = [Space(unit, distances[0].metric, name="normalised features")]
    width = project(unit.fit_projector(train[:2], posterior), train[:1]).shape[1]
    if targets is not None and isinstance(posterior.likelihood, ClassLikelihood) and width <= LARGEST_COVARIANCE:
        spaces.append(Space(unit, ClassGaussian(), name="features and class means"))
    return spaces


def _features_differ(posterior: Posterior, layer: str, x: Tensor) -> bool:
    """Whether a posterior has members, and of their own what enters the layer."""
    if not isinstance(posterior, NetworkPosterior) or not posterior.are_members:
        return False
    entered = posterior.layer_inputs(layer, x)
    return bool((entered != entered[:1]).any())


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
