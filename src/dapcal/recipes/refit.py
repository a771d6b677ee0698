"""Members trained again, on all rows, once calibration has said how long and how far."""

from __future__ import annotations

from dataclasses import replace

from dapcal.calibrate import Calibrated
from dapcal.data import gather
from dapcal.posteriors.network import NetworkPosterior
from dapcal.posteriors.training import Options, cosine
from dapcal.recipes.boosting import same_trees
from dapcal.recipes.posteriors import Task, Watch, brought, networks, sharing_members
from dapcal.types import Posterior

REFITTED = ("ensemble", "tabm")  # posteriors that can be


def refitted(calibrated: Calibrated, task: Task, watch: Watch, which: str = "all rows") -> Calibrated:
    """Members trained on all rows predict in place of the old ones, which stay as `before`.

    Args:
        calibrated: of the old members.
        task: with all rows to learn; in regression without those that judge, which say how wide intervals are.
        watch: what it has seen of the old members' epochs.
        which: rows those are, in words.
    """
    again_on = Watch(watch.progress, "training on all rows", watch.runs)
    if task.brought is not None:
        new = replace(calibrated.posterior, forest=brought(task, again_on).forest)  # type: ignore[type-var]
        return replaced(calibrated, new, f"{task.brought.name} fitted again to {which}")
    epochs = best_epoch(watch)
    share = epochs / task.options["epochs"]
    again: Options = {
        "epochs": epochs,
        "schedule": lambda optimizer, steps: cosine(optimizer, round(steps / share)),  # stops where the old ones did
        "held_out": None,
        "patience": None,
        "progress": again_on,
    }
    old = calibrated.posterior
    assert isinstance(old, NetworkPosterior)
    members = _members(task, again, old)
    new_trees = same_trees(members, old, gather(task.train, "train"), task.recipe.seed, weights=task.weights)
    return replaced(calibrated, new_trees, f"networks trained again on {which}, {epochs} epochs each")


def best_epoch(watch: Watch) -> int:
    """The median of those at which members were at their best."""
    return sorted(epoch for _, epoch in watch.best)[len(watch.best) // 2]


def replaced(calibrated: Calibrated, posterior: Posterior, note: str) -> Calibrated:
    """New members predict, the old ones stay as `before`.

    φ, temperature, distances and held-out scores are those of the old members, and so is the doubt that new rows are
    scored by: the held-out rows, which the old ones have not seen, are to them as new rows are, and p-values hold.
    """
    return replace(
        calibrated,
        posterior=posterior,
        before=calibrated.posterior,
        measured=None if calibrated.measured is None else replace(calibrated.measured, refitted=True),
        notes=(*calibrated.notes, note),
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
