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
from dapcal.distances import FittedSpace, NearestNeighbor, Space, raw_in
from dapcal.records import ALPHA
from dapcal.types import Posterior

NEAREST = 3.0  # times that nearest inputs count beside the sum: doubt and features say less of subgroups


def with_evidence(calibrated: Calibrated, train: Labelled, held_out: Labelled, spaces: Sequence[Space]) -> Calibrated:
    """The same posterior, whose OOD score also heeds what is measured in some spaces; predictions stay as they are.

    What is fitted is fitted to training inputs; scales come from the held-out rows that chose φ, p-values from those
    that judge, as for all evidence. Once the scales are known, the rows that chose join those that nearest neighbours
    are looked for among. To whatever was fitted, in whatever way, rows that judge are as new rows are, as long as these
    are measured alike: so p-values hold, and the more rows there are to compare with, the better they tell.

    Nearest neighbours that (nearly) all rows which choose are equally far from have no scale, and are left out.

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
    chose, judge = (held_out.x[half.to(held_out.x.device)] for half in (calibrated.chooses, calibrated.judges))
    spaces = [replace(space, radius=None) for space in spaces]
    fitted = [space.fit(train.x, held_out.x, calibrated.posterior, train.y) for space in spaces]
    raw = raw_in(tuple(fitted), chose)
    kept = [place for place, space in enumerate(fitted) if not _is_nearest(space) or _varies(raw[place])]
    if not kept:
        return calibrated
    among = torch.cat([train.x, chose.to(train.x)])
    larger = tuple(_among(spaces[place], fitted[place], among, calibrated.posterior) for place in kept)
    there = _there(calibrated, chose)
    evidence = with_beside(
        calibrated.evidence,
        larger,
        (there, raw[kept].to(there)),
        (_there(calibrated, judge), raw_in(larger, judge).to(there)),
        alone=tuple(len(there) + place for place, space in enumerate(larger) if _is_nearest(space)),
        times=NEAREST - 1,  # once they stand there already
    )
    measured = calibrated.measured
    if measured is not None:
        flagged = float((leave_one_out(evidence.held_out) <= ALPHA).double().mean())
        measured = replace(measured, flagged=flagged)
    note = f"beside the sum of evidence: {', '.join(space.name for space in larger)}"
    return replace(calibrated, evidence=evidence, measured=measured, notes=(*calibrated.notes, note))


def _there(calibrated: Calibrated, x: Tensor) -> Tensor:
    """Pieces of evidence that are there, standardised, (M, N)."""
    pieces = calibrated.predict(x).evidence.values()
    return torch.stack([piece.standardised for piece in pieces]).to(calibrated.evidence.center)


def _among(space: Space, fitted: FittedSpace, rows: Tensor, posterior: Posterior) -> FittedSpace:
    """A space in which more rows may be the nearest; others stay as they are."""
    return replace(space, projector=fitted.projector).fit(rows, rows, posterior) if _is_nearest(fitted) else fitted


def _is_nearest(space: FittedSpace) -> bool:
    return isinstance(space.metric, NearestNeighbor)


def _varies(raw: Tensor) -> bool:
    """Whether more than one row in twenty is farther than the median."""
    return bool(raw.quantile(0.95) > raw.median())
