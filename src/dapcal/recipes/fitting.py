"""From a matrix and targets to a calibrated posterior, with nothing left to choose.

rows ──► train │ held-out ──► networks ──► posterior ──► `dapcal.calibrate` ──► Fitted
          └──► refits with regions left out ──► adjustment, loss of φ ──┘
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from dapcal.adjust import Unchanged
from dapcal.beside import with_evidence
from dapcal.calibrate import Calibrated, calibrate
from dapcal.calibration.gap_choice import NONE, GapChoice, paired, steps, words
from dapcal.calibration.inputs import Around
from dapcal.calibration.reference import choose_reference
from dapcal.data import Data, Labelled, gather, order_of, split
from dapcal.distances import Coreset, Space, nearest
from dapcal.distances.choosing import Measured, informative
from dapcal.distances.projectors import Identity
from dapcal.errors import NothingToCalibrate
from dapcal.likelihoods import ClassLikelihood, Likelihood
from dapcal.posteriors.trees import TreePosterior
from dapcal.progress import Stages
from dapcal.recipes.bins import are_numbers
from dapcal.recipes.boosting import with_trees
from dapcal.recipes.bounds import Bounds
from dapcal.recipes.crossing import crossing, is_crossed
from dapcal.recipes.crossing import note as crossing_note
from dapcal.recipes.division import check_rows, check_weights, places
from dapcal.recipes.estimators import Brought
from dapcal.recipes.gaps import Gaps, InRegions, adjustments, read_gaps
from dapcal.recipes.intervals import has_intervals, note, with_intervals
from dapcal.recipes.noise import with_row_noise
from dapcal.recipes.posteriors import RUNS, Task, Watch, one_thread, options_of, posterior_of
from dapcal.recipes.recipe import ESTIMATOR, Recipe, maker
from dapcal.recipes.refit import REFITTED, refitted
from dapcal.types import DapcalWarning, Posterior

GAPS = "leaving out regions"  # the stage of gap cross-validation
NO_BOUNDS = Bounds()
APART = 500  # rows that say how wide intervals are, at most: those of 95 % hold 95 ± 1 % then


class Fitted(NamedTuple):
    """A calibrated posterior, the rows it was made from, and what gap cross-validation chose, where it was asked."""

    calibrated: Calibrated
    train: Labelled
    held_out: Labelled
    gaps: GapChoice | None = None
    rows: Tensor | None = None  # places of the training rows among those that were given


def fit(
    x: Tensor,
    y: Tensor,
    likelihood: Likelihood,
    outputs: int,
    recipe: Recipe,
    progress: Stages | None = None,
    evidence: Sequence[Space] = (),
    bounds: Bounds = NO_BOUNDS,
    weights: Tensor | None = None,
    estimators: Sequence[Any] = (),
) -> Fitted:
    """Hold out rows, train what the recipe names on the others, and calibrate it.

    The half of the held-out rows that chooses φ also stops training, where its NLL falls no more; nothing sees the half
    that gives p-values before. dapcal's warnings become `calibrated.notes`: on tables with few rows, few errors or many
    equal rows they are the rule.

    Args:
        x: standardised inputs, (N, P); the network has their dtype.
        y: targets as the likelihood wants them: classes 0 to K − 1, or numbers (standardised).
        likelihood: p(y | outputs).
        outputs: C, of the network.
        recipe: how.
        progress: told of the epochs of all networks while "training", and of those that refits need while "leaving out
            regions" (unless `fast`), of 0 and 1 of 1 while "calibrating", and with `refit` of epochs again while
            "training on all rows".
        evidence: spaces whose measure stands beside the sum of the other evidence (`dapcal.beside`).
        bounds: of the targets, which intervals respect.
        weights: of the rows, (N,), in training and in all that held-out rows choose; for intervals and p-values all
            rows count alike.
        estimators: for the recipe's posterior "estimator": one of scikit-learn's ensembles of trees that is not fitted,
            or several; it is fitted in place of networks, and its members are the draws (`dapcal.recipes.estimators`).
    """
    if bool(estimators) != (recipe.posterior == ESTIMATOR):
        raise ValueError(
            f"Expected `estimators` for the posterior {ESTIMATOR!r} alone, got {len(estimators)} for "
            f"{recipe.posterior!r}; on the command line --estimator names them"
        )
    brought = Brought(tuple(estimators), likelihood, outputs) if estimators else None
    data = gather((x.to(recipe.device), y.to(recipe.device)), "x")
    check_rows(data, likelihood)
    data = data._replace(y=likelihood.check(data.x.new_zeros(len(data.x), outputs), data.y))
    weights = check_weights(weights, data, recipe)
    of_train, of_held_out = places(data.y, recipe, isinstance(likelihood, ClassLikelihood))
    train, held_out = (data.subset(rows.to(data.x.device)) for rows in (of_train, of_held_out))

    numbers = are_numbers(train.x).cpu()

    def make_for(rows: Labelled) -> Callable[[], nn.Module]:
        return maker(rows, outputs, recipe, numbers)

    first = split(len(held_out.x), torch.Generator().manual_seed(recipe.seed))[0]
    if weights is not None:  # rows that choose are drawn by their weights; those that judge count alike
        held_out = held_out.subset(_drawn(first, weights[of_held_out].cpu(), recipe.seed).to(data.x.device))
    chooses = held_out.subset(first.to(data.x.device))
    told = progress or (lambda *_: None)
    watch = Watch(told, "training", RUNS.get(recipe.posterior, recipe.members))
    options = options_of(recipe, len(train.x), chooses, watch)
    learnt = None if weights is None else weights[of_train]
    task = Task(make_for, likelihood, (train.x, train.y), (chooses.x, chooses.y), recipe, options, learnt, brought)
    notes: list[str] = []
    with one_thread(), _warnings_to(notes):
        posterior = posterior_of(task, watch)
        watch.end()
        notes += [brought.told(posterior)] if brought is not None and isinstance(posterior, TreePosterior) else []
        for is_asked, changed in (
            (recipe.trees, lambda known: with_trees(known, train, chooses, recipe.seed, learnt)),
            (recipe.row_noise, lambda known: with_row_noise(known, chooses)),
        ):
            posterior, told_of = changed(posterior) if is_asked else (posterior, None)
            notes += [told_of] if told_of else []
    given: _Given = {
        "train": (train.x, train.y),
        "held_out": (held_out.x, held_out.y),
        "seed": recipe.seed,
        "guard": recipe.guard,
    }
    gaps = None if recipe.fast else _gaps(task, posterior, chooses, told)
    told("calibrating", 0, 1)
    if gaps is None:
        choice = None
        with _warnings_to(notes):
            calibrated = _calibrated(posterior, given, task, chooses)
    else:
        calibrated, choice = _by_gaps(posterior, given, *gaps, notes)
        notes.append(words(choice))
    calibrated = with_intervals(calibrated, held_out, bounds)
    calibrated = replace(calibrated, notes=(*calibrated.notes, *notes))
    calibrated = with_evidence(calibrated, train, held_out, evidence)
    told("calibrating", 1, 1)
    if recipe.refit and recipe.posterior in (*REFITTED, ESTIMATOR):
        with one_thread():
            everything = task._replace(train=(data.x, data.y), weights=weights)
            calibrated = _again(calibrated, everything, watch, (of_train, of_held_out), bounds)
    elif has_intervals(calibrated):
        calibrated = replace(calibrated, notes=(*calibrated.notes, note(len(calibrated.evidence.held_out))))
    return Fitted(calibrated, train, held_out, choice, of_train)


def _again(
    calibrated: Calibrated, task: Task, watch: Watch, places: tuple[Tensor, Tensor], bounds: Bounds
) -> Calibrated:
    """Members trained on all rows; those of numbers on all but the ones that intervals are as wide as, `APART` at most.

    Args:
        calibrated: of members that have learnt the training rows.
        task: with all rows to learn.
        watch: what it has seen of those members.
        places: of the training rows and of those that are held out, among all.
        bounds: of the targets.
    """
    if not has_intervals(calibrated):
        return refitted(calibrated, task, watch)
    data, (of_train, of_held_out) = gather(task.train, "train"), places
    held_out = data.subset(of_held_out.to(data.x.device))
    if is_crossed(calibrated, task, held_out):
        found, told = crossing(calibrated, task, watch, held_out, bounds), crossing_note(len(data.x))
    else:
        assert calibrated.chooses is not None
        assert calibrated.judges is not None
        judges = calibrated.judges.cpu()  # in random order
        apart, others = judges[:APART], judges[APART:]
        kept = torch.cat([of_train, of_held_out[calibrated.chooses.cpu()], of_held_out[others]]).to(data.x.device)
        weights = None if task.weights is None else task.weights[kept]
        fewer = task._replace(train=(data.x[kept], data.y[kept]), weights=weights)
        which = "those" if not len(others) else f"{len(apart)} of those"
        found = refitted(calibrated, fewer, watch, f"all rows but {which} that judge")
        found = with_intervals(found, held_out, bounds, apart)
        told = note(len(apart))
    return replace(found, notes=(*found.notes, told))


def _drawn(first: Tensor, weights: Tensor, seed: int) -> Tensor:
    """Places of rows, of which the `first` are drawn in proportion to their weights (n,), as many as there are."""
    places = torch.arange(len(weights))
    if weights[first].any():
        places[first] = first[order_of(len(first), torch.Generator().manual_seed(seed), weights[first])]
    return places


class _Given(TypedDict):
    train: Data
    held_out: Data
    seed: int
    guard: float


def _gaps(task: Task, posterior: Posterior, chooses: Labelled, told: Stages) -> tuple[Measured, Gaps] | None:
    """Spaces that count, and refits read in regions; None where the table has no typical distance or too few rows."""
    reference = choose_reference(posterior, chooses, guard=task.recipe.guard)  # `calibrate` finds the same
    train = gather(task.train, "train")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DapcalWarning)  # calibration says it again
            measured = _measured(reference.posterior, task.recipe, train, chooses)
    except NothingToCalibrate:
        return None
    if not measured.distance(chooses.x).any():  # nothing that a φ could be checked on
        return None
    with one_thread():
        scaled = reference.posterior.likelihood != posterior.likelihood
        gaps = read_gaps(
            task,
            reference.posterior,
            measured.spaces,
            scaled,
            reference.share,
            lambda done, total: told(GAPS, done, total),
        )
    return None if gaps is None else (measured, gaps)


def _by_gaps(
    posterior: Posterior, given: _Given, measured: Measured, gaps: Gaps, notes: list[str]
) -> tuple[Calibrated, GapChoice]:
    """The adjustment and φ that gain in regions; the guard is checked after the choice.

    Where no φ that the guard allows gains more than its standard error, the next plainer adjustment is asked.
    """
    found = steps(gaps.none, gaps.curves())
    best = {step.name: float(gaps.factors[step.place]) for step in found}
    held_back: list[str] = []
    for name in [step.name for step in reversed(found) if step.taken]:
        told: list[str] = []
        with _warnings_to(told):
            calibrated = calibrate(
                posterior,
                **given,
                distance=measured,
                adjust=gaps.offered[name],
                loss=InRegions(gaps.at[name]),
            )
        if paired(gaps.none, gaps.at[name](calibrated.factor)).counts:
            notes.extend(told)
            regions = gaps.read({**best, name: calibrated.factor})
            return calibrated, GapChoice(name, regions, tuple(held_back))
        held_back.append(name)
    with _warnings_to(notes):
        calibrated = calibrate(posterior, **given, distance=measured, adjust=Unchanged())
    return calibrated, GapChoice(NONE, gaps.read(best), tuple(held_back))


def _measured(posterior: Posterior, recipe: Recipe, train: Labelled, chooses: Labelled) -> Measured:
    """Spaces that count, from all training rows or from those that are kept."""
    kept = None if recipe.points is None else Coreset(recipe.points, seed=recipe.seed)
    return informative(posterior, train.x, chooses, targets=train.y, metric=partial(nearest, index=kept))


def _calibrated(posterior: Posterior, given: _Given, task: Task, chooses: Labelled) -> Calibrated:
    """`calibrate` with its defaults, or what is left of them."""
    adjust = adjustments(posterior.likelihood, task.recipe)["Inflate"]
    try:
        if task.recipe.points is None:
            return calibrate(posterior, adjust=adjust, **given)
        scaled = choose_reference(posterior, chooses, guard=task.recipe.guard).posterior
        measured = _measured(scaled, task.recipe, gather(task.train, "train"), chooses)
        return calibrate(posterior, distance=measured, adjust=adjust, **given)
    except NothingToCalibrate:
        # nearly every held-out row has a twin in training, or all have one and the same distance: the table has no
        # typical distance to start a radius at, and no row away from the data
        around = Around(deviation=1.0, seed=given["seed"])
        space = Space(Identity(), radius=None, name="inputs")
        return calibrate(posterior, distance=space, ood=around, adjust=adjust, **given)


@contextmanager
def _warnings_to(notes: list[str]) -> Iterator[None]:
    """dapcal's own warnings as notes; others as they are."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DapcalWarning)
        yield
    for warning in caught:
        if issubclass(warning.category, DapcalWarning):
            notes.append(str(warning.message))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
