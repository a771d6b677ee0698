"""Members trained again, on all rows, once calibration has said how long and how far."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from dapcal.calibrate import Calibrated
from dapcal.data import gather
from dapcal.distances import Distance, FittedSpace, NearestNeighbor, nearest
from dapcal.distances.projectors import project
from dapcal.posteriors.network import NetworkPosterior
from dapcal.posteriors.training import Options, cosine
from dapcal.recipes.posteriors import Task, Watch, networks, sharing_members

REFITTED = ("ensemble", "tabm")  # posteriors that can be


def refitted(calibrated: Calibrated, task: Task, watch: Watch) -> Calibrated:
    """Members trained on all rows in place of the old ones; `center`, whose features give distances, stays.

    φ, temperature and held-out scores are those of the old members, which had not seen the held-out rows: p-values hold
    as far as the new members doubt new rows as much as the old ones did. Measured (benchmarks/validity.py): those of
    the score and of distances hold, as distances only shrink; that of doubt alone fails in regression, where few
    members agree more or less by luck (P(p <= 0.05) = 0.063 ± 0.003 with 500 rows that judge).
    """
    epochs = sorted(epoch for _, epoch in watch.best)[len(watch.best) // 2]
    share = epochs / task.options["epochs"]
    again: Options = {
        "epochs": epochs,
        "schedule": lambda optimizer, steps: cosine(optimizer, round(steps / share)),  # stops where the old ones did
        "held_out": None,
        "patience": None,
        "progress": Watch(watch.progress, "training on all rows", watch.runs),
    }
    posterior, x = calibrated.posterior, gather(task.train, "x").x
    assert isinstance(posterior, NetworkPosterior)
    return replace(
        calibrated,
        posterior=_members(task, again, posterior),
        distance=Distance(tuple(_measured_from(space, x) for space in calibrated.distance.spaces)),
        evidence=replace(
            calibrated.evidence, further=tuple(_measured_from(space, x) for space in calibrated.evidence.further)
        ),
        measured=None if calibrated.measured is None else replace(calibrated.measured, refitted=True),
        notes=(*calibrated.notes, f"networks trained again on all rows, {epochs} epochs each"),
    )


def _members(task: Task, again: Options, old: NetworkPosterior) -> NetworkPosterior:
    """New draws, and new weights that they share; the network that stands for the posterior is the old one."""
    if task.recipe.posterior == "ensemble":
        return replace(old, draws=networks(_with(task, again), task.recipe.members).draws)
    told: Options = {"progress": again["progress"]}
    new = sharing_members(_with(task, told), last=again["epochs"])
    return replace(old, draws=new.draws, shared=new.shared, central=old.shared)


def _with(task: Task, options: Options) -> Task:
    return task._replace(options={**task.options, **options})


def _measured_from(space: FittedSpace, x: Tensor) -> FittedSpace:
    """The same space with distances from all rows: never longer, so that p-values grow at most; other metrics stay."""
    if not isinstance(space.metric, NearestNeighbor):
        return space
    return replace(space, metric=nearest(project(space.projector, x)))
