"""Approximate neighbours whose points lie in a file: of a search only the lists that it looks at are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dapcal.distances.inverted_lists import IVF, InvertedLists
from dapcal.distances.lists import in_lists
from dapcal.distances.neighbors import TorchIndex
from dapcal.distances.quality import UNMEASURED
from dapcal.files import complete_or_absent

_BYTES = 2**26  # written at a time


@dataclass(frozen=True)
class OnDisk:
    """Recipe: inverted lists over points in a file, which is mapped into memory and not read as a whole.

    The file belongs to the index as long as that lives; an artefact holds a copy of the points.

    Args:
        path: where the points are written, list by list; a file of that name is replaced.
        lists: how lists are made and searched.
    """

    path: str | Path
    lists: IVF = field(default_factory=IVF)

    def __call__(self, points: Tensor) -> InvertedLists:
        """Fit the lists, and write the points in their order."""
        points = TorchIndex(points).points.cpu()
        own = in_lists(points, self.lists.lists, self.lists.seed, self.lists.memory)
        _write(self.path, points, own.order)
        numbers = torch.from_file(str(self.path), shared=False, size=points.numel(), dtype=points.dtype)
        index = InvertedLists(numbers.view(points.shape), own, 1, UNMEASURED, self.lists.memory)
        return self.lists.probed(index, points)


def _write(path: str | Path, points: Tensor, order: Tensor) -> None:
    rows = max(1, _BYTES // (points.element_size() * points.shape[1]))
    with complete_or_absent(path) as part, part.open("wb") as file:
        for block in order.split(rows):
            file.write(points[block].contiguous().view(torch.uint8).numpy().data)
