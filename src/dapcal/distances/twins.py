"""Held-out inputs that are training inputs, too: what is read off them, p-values first, does not hold for new ones."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from dapcal.distances.metrics import NearestNeighbor
from dapcal.distances.neighbors import TorchIndex
from dapcal.distances.projectors import Identity, project
from dapcal.distances.spaces import FittedSpace
from dapcal.distances.spread import neighbors
from dapcal.mapped import taken
from dapcal.records import DapcalWarning

FEWEST = 20  # held-out inputs
SHARE = 0.02  # of them
_SURE = 3  # standard errors that twins exceed copies by
_ROUNDING = 1e-5  # of a typical distance: features of one input differ with the batch that they are computed in


def notice(measured: Sequence[tuple[FittedSpace, Tensor]], train: Tensor) -> None:
    """Warn where held-out inputs are training inputs more often than training inputs are copies of each other.

    Args:
        measured: spaces, with the distances (N,) of held-out inputs before the radius; inputs tell, else features, in
            each case those among which neighbours are looked for exactly.
        train: training inputs (T, ...).
    """
    telling = [(space, raw) for space, raw in measured if _tells(space)]
    telling.sort(key=lambda one: not isinstance(one[0].projector, Identity))
    if not telling or len(telling[0][1]) < FEWEST or len(train) < 2:
        return
    space, raw = telling[0]
    least = _ROUNDING * float(raw.double().quantile(0.95))
    twins = int((raw <= least).sum())
    if twins <= SHARE * len(raw):
        return
    rows = torch.linspace(0, len(train) - 1, min(len(raw), len(train))).round().long().to(train.device)
    some = project(space.projector, taken(train, rows))
    second = neighbors(space.metric.index, some, 2)[0][:, 1]  # type: ignore[attr-defined]
    copies = int((second <= least).sum()) * len(raw) / len(rows)
    if twins - copies > _SURE * (twins + 2 * copies) ** 0.5:  # copies come in pairs
        warnings.warn(
            f"{twins} of {len(raw)} held-out inputs are training inputs too, so p-values are too small; remove them "
            "from one of both",
            DapcalWarning,
            stacklevel=5,
        )


def _tells(space: FittedSpace) -> bool:
    metric = space.metric
    return isinstance(metric, NearestNeighbor) and metric.k == 1 and isinstance(metric.index, TorchIndex)
