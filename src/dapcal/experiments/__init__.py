"""The paper's experiments, next to ours. Needs the extras `cli` and `plots`."""

from dapcal.experiments import every_posterior, images, sinusoid, two_moons, uci_gap
from dapcal.experiments.records import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    "two-moons": two_moons.EXPERIMENT,
    "sinusoid": sinusoid.EXPERIMENT,
    "posteriors": every_posterior.EXPERIMENT,
    "uci-gap": uci_gap.EXPERIMENT,
    **images.EXPERIMENTS,
}
DEMO = ("two-moons", "sinusoid")
"""The experiments that take seconds."""

__all__ = ["DEMO", "EXPERIMENTS", "Experiment"]
