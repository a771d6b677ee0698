"""A few training points that stand for all: search and file then have a size that is known beforehand.

Distances to fewer points are larger, and training inputs that are not kept are no longer at distance 0. Held-out inputs
are measured the same way, so radius, φ and p-values are those of the kept points.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dapcal.distances.neighbors import TorchIndex
from dapcal.distances.projectors import median_distance
from dapcal.distances.quality import UNMEASURED, SearchQuality, reference
from dapcal.storing import Stores

_FOURIER = 256  # random features of the kernel


@dataclass(frozen=True)
class Coreset:
    """Recipe: at most `size` training points are kept, and searched exactly.

    Args:
        size: points that are kept.
        method: "k-center" takes the point that is farthest from those taken before (Gonzalez 1985), so that no point is
            far from all; "herding" those whose density is most like that of all points (Chen et al. 2010).
        sample: points that are chosen among, drawn by `seed` where there are more. Time: `size` × `sample` × P.
        seed: of the sample and of herding's random features.
    """

    size: int
    method: str = "k-center"
    sample: int = 100_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or self.sample < self.size:
            raise ValueError(f"Expected `size` between 1 and `sample` ({self.sample}), got {self.size}")
        if self.method not in _METHODS:
            raise ValueError(f"Expected `method` as one of {sorted(_METHODS)}, got {self.method!r}")

    def __call__(self, points: Tensor) -> KeptPoints:
        """Choose the points, and measure what that does to distances."""
        points = TorchIndex(points).points
        generator = torch.Generator().manual_seed(self.seed)
        rows = torch.arange(len(points))
        if len(points) > self.sample:
            rows = torch.randperm(len(points), generator=generator)[: self.sample].sort().values
        kept = rows
        if len(rows) > self.size:
            kept = rows[_METHODS[self.method](points[rows.to(points.device)], self.size, generator).cpu()].sort().values
        kept = kept.to(points.device)
        index = KeptPoints(TorchIndex(points[kept]), kept, len(points), UNMEASURED)
        others = torch.ones(len(points), dtype=torch.bool, device=points.device).index_fill_(0, kept, False)
        return KeptPoints(index.index, kept, len(points), reference(points, self.seed, others).quality(index))


@dataclass(frozen=True, eq=False)
class KeptPoints:
    """The nearest of the training points that are kept.

    Attributes:
        index: over the kept points.
        rows: which training points these are, ascending.
        total: how many there were.
        quality: as measured at fitting, on training points that are not kept.
    """

    stores = Stores()

    index: TorchIndex
    rows: Tensor
    total: int
    quality: SearchQuality

    def __post_init__(self) -> None:
        fine = self.rows.dtype == torch.int64 and self.rows.shape == (len(self.index.points),)
        if not fine or int(self.rows.min()) < 0 or int(self.rows.max()) >= self.total:
            raise ValueError("Expected a row of the training points for every point that is kept; fit the index again")

    @property
    def note(self) -> str:
        """What is kept, and what that does to distances, in words."""
        return f"{len(self.rows)} of {self.total} training points are kept: {self.quality}"

    def query(self, points: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
        """Distances (N, k), ascending, and indices (N, k) among all training points."""
        distances, places = self.index.query(points, k)
        return distances, self.rows[places]


def k_center(points: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Rows (size,): each the farthest from all before it, the first the nearest to the mean."""
    del generator  # nothing is drawn
    shifted = points - points.mean(0)
    lengths = (shifted**2).sum(1)
    rows = [int(lengths.argmin())]
    nearest = torch.full_like(lengths, torch.inf)
    while len(rows) < size:
        taken = shifted[rows[-1]]
        nearest = torch.minimum(nearest, lengths - 2 * (shifted @ taken) + lengths[rows[-1]])
        nearest[rows[-1]] = -torch.inf
        rows.append(int(nearest.argmax()))
    return torch.tensor(rows)


def herding(points: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Rows (size,): each brings the mean of a Gaussian kernel's random features nearest to that of all points."""
    length = median_distance(points, generator)
    frequencies = torch.randn(points.shape[1], _FOURIER, generator=generator).to(points) / length
    phases = 2 * math.pi * torch.rand(_FOURIER, generator=generator).to(points)
    features = torch.cat([(block @ frequencies + phases).cos() for block in points.split(2**16)])
    mean = features.mean(0)
    wanted, rows = mean.clone(), list[int]()
    open_rows = torch.zeros(len(points), device=points.device, dtype=points.dtype)
    while len(rows) < size:
        rows.append(int((features @ wanted + open_rows).argmax()))
        open_rows[rows[-1]] = -torch.inf
        wanted += mean - features[rows[-1]]
    return torch.tensor(rows)


_METHODS: dict[str, Callable[[Tensor, int, torch.Generator], Tensor]] = {"k-center": k_center, "herding": herding}
