"""Further evidence for a calibrated posterior, which stands beside the sum of its pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dapcal.calibrate import Calibrated
from dapcal.calibration.ood_score import with_beside
from dapcal.calibration.summary import leave_one_out
from dapcal.data import Labelled
from dapcal.distances import FittedSpace, Space, raw_in
from dapcal.distances.projectors import Identity
from dapcal.records import ALPHA

INPUTS = 3.0  # times that distances between inputs count beside the sum: doubt and features say less of subgroups


def with_evidence(calibrated: Calibrated, train: Labelled, held_out: Labelled, spaces: Sequence[Space]) -> Calibrated:
    """The same posterior, whose OOD score also heeds what is measured in some spaces; predictions stay as they are.

    What is fitted is fitted to training inputs; scales come from the held-out rows that chose φ, p-values from those
    that judge, as for all evidence.

    Args:
        calibrated: what predicts.
        train: its training data.
        held_out: its held-out data, all of them and in the same order.
        spaces: where to measure; they need no radius.
    """
    if not spaces:
        return calibrated
    if calibrated.chooses is None or calibrated.judges is None:
        raise ValueError("This file is of an earlier version, which kept no halves of held-out rows; calibrate again")
    fitted = tuple(
        replace(space, radius=None).fit(train.x, held_out.x, calibrated.posterior, train.y) for space in spaces
    )
    halves = [held_out.x[half.to(held_out.x.device)] for half in (calibrated.chooses, calibrated.judges)]
    scaling, conformal = (_pieces(calibrated, fitted, x) for x in halves)
    # nearest rows alone find a subgroup that training never saw where the model does not doubt and features are alike
    alone = tuple(1 + i for i, s in enumerate(calibrated.distance.spaces) if isinstance(s.projector, Identity))
    evidence = with_beside(calibrated.evidence, fitted, scaling, conformal, alone, INPUTS)
    measured = calibrated.measured
    if measured is not None:
        flagged = float((leave_one_out(evidence.held_out) <= ALPHA).double().mean())
        measured = replace(measured, flagged=flagged)
    note = f"beside the sum of evidence: {', '.join(space.name for space in fitted)}"
    return replace(calibrated, evidence=evidence, measured=measured, notes=(*calibrated.notes, note))


def _pieces(calibrated: Calibrated, spaces: tuple[FittedSpace, ...], x: Tensor) -> tuple[Tensor, Tensor]:
    """Pieces of evidence that are there, standardised, and new ones, as they are measured."""
    there = calibrated.predict(x).evidence.values()
    old = torch.stack([piece.standardised for piece in there]).to(calibrated.evidence.center)
    return old, raw_in(spaces, x).to(old)
