"""The paper's experiments, next to ours. Needs the extras `cli` and `plots`.

`toys/`, `gap/`, `images/`, `cifar/` and `no_harm/` are the experiments, `datasets/` their data, `page/` what the
documentation makes of their results; the files beside these folders are what the experiments share.
"""

from dapcal.experiments.cifar.run import EXPERIMENT as _CIFAR10
from dapcal.experiments.gap import experiment as uci_gap
from dapcal.experiments.images.tasks import EXPERIMENTS as _IMAGES
from dapcal.experiments.no_harm.experiment import EXPERIMENT as _NO_HARM
from dapcal.experiments.records import Experiment
from dapcal.experiments.toys import every_posterior, sinusoid, two_moons

EXPERIMENTS: dict[str, Experiment] = {
    "two-moons": two_moons.EXPERIMENT,
    "sinusoid": sinusoid.EXPERIMENT,
    "posteriors": every_posterior.EXPERIMENT,
    "uci-gap": uci_gap.EXPERIMENT,
    "no-harm": _NO_HARM,
    **_IMAGES,
    "cifar10": _CIFAR10,
}
DEMO = ("two-moons", "sinusoid")
"""The experiments that take seconds."""

__all__ = ["DEMO", "EXPERIMENTS", "Experiment"]
