"""The paper's experiments, next to ours. Needs the extras `cli` and `plots`."""

from dapcal.experiments import sinusoid, two_moons
from dapcal.experiments.records import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    "two-moons": two_moons.EXPERIMENT,
    "sinusoid": sinusoid.EXPERIMENT,
}

__all__ = ["EXPERIMENTS", "Experiment"]
