"""The paper's experiments, next to ours. Needs the extras `cli` and `plots`."""

from dapcal.experiments import every_posterior, sinusoid, two_moons
from dapcal.experiments.records import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    "two-moons": two_moons.EXPERIMENT,
    "sinusoid": sinusoid.EXPERIMENT,
    "posteriors": every_posterior.EXPERIMENT,
}
DEMO = ("two-moons", "sinusoid")
"""The experiments that take seconds."""

__all__ = ["DEMO", "EXPERIMENTS", "Experiment"]
