"""Our default and the paper's estimator, calibrated on the same posterior and the same OOD inputs."""

from __future__ import annotations

from torch import Tensor

from dapcal.adjust import Reweight
from dapcal.calibrate import Calibrated, calibrate
from dapcal.calibration.inputs import OODInputs
from dapcal.distances import Space
from dapcal.progress import Stages
from dapcal.types import Posterior


def ours_and_papers(
    posterior: Posterior,
    train: tuple[Tensor, Tensor],
    held_out: tuple[Tensor, Tensor],
    ood: OODInputs,
    papers_space: Space,
    progress: Stages,
) -> tuple[Calibrated, Calibrated]:
    """Ours with all defaults; the paper's with closed-form weights, no guard, in the given space (without radius)."""
    progress("calibrating", 0, 2)
    ours = calibrate(posterior, train=train, held_out=held_out, ood=ood)
    progress("calibrating", 1, 2)
    papers = calibrate(
        posterior, train=train, held_out=held_out, ood=ood, distance=papers_space, adjust=Reweight(), guard=None
    )
    progress("calibrating", 2, 2)
    return ours, papers
