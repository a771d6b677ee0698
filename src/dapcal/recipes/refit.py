"""Members trained again, on all rows, once calibration has said how long and how far."""

from __future__ import annotations

from dataclasses import replace

from dapcal.calibrate import Calibrated
from dapcal.data import gather
from dapcal.posteriors.network import NetworkPosterior
from dapcal.posteriors.training import Options, cosine
from dapcal.recipes.boosting import same_trees
from dapcal.recipes.posteriors import Task, Watch, networks, sharing_members

REFITTED = ("ensemble", "tabm")  # posteriors that can be


def refitted(calibrated: Calibrated, task: Task, watch: Watch) -> Calibrated:
    """Members trained on all rows predict in place of the old ones, which stay as `before`.

    φ, temperature, distances and held-out scores are those of the old members, and so is the doubt that new rows are
    scored by: the held-out rows, which the old ones have not seen, are to them as new rows are, and p-values hold.
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
    old = calibrated.posterior
    assert isinstance(old, NetworkPosterior)
    new = same_trees(_members(task, again, old), old, gather(task.train, "train"), task.recipe.seed)
    return replace(
        calibrated,
        posterior=new,
        before=old,
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
