"""What is read off the columns of a table, row by row: decimals, how often a value was seen, what others let expect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dapcal.storing import Stores

_MOST_VALUES = 1000  # distinct training values of a number up to which they are known one by one
_MOST_OTHERS = 512  # input columns that a number is compared with
_COMMON = 0.01  # share of training rows that must have a code, and lack it, for it to be compared with
_DECIMALS = tuple(range(6, -4, -1))
_ROUNDING = 4e-7  # of a standardised float32
_MANY = 9.0  # decimals where there are more than float32 can tell


@dataclass(frozen=True)
class Part:
    """Where the inputs of one column of a table stand.

    Attributes:
        number: input column of a standardised number; None for a category.
        codes: input columns of a category's levels, those for missing and unknown ones among them.
        missing: input column that marks missing values, where there is one.
        center: value = center + scale · input.
        scale: of a number.
    """

    stores = Stores()

    number: int | None = None
    codes: tuple[int, ...] = ()
    missing: int | None = None
    center: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class Places:
    """Where the inputs of all columns stand, as tensors that look at all of them at once; made by `places_of`.

    Attributes:
        columns: how many there are.
        numbers: input columns of the numbers, (K,).
        center: of each number, (K, 1) in float64.
        scale: likewise.
        missing: input column that marks missing values of each number, (K,); its own where there is none.
        is_marked: whether there is one, (K, 1).
        codes: input columns of each category's levels, (categories, L); the last one again where there are fewer.
        marked: columns that have a mark, (m,).
        marks: input columns of these marks, (m,).
    """

    columns: int
    numbers: Tensor
    center: Tensor
    scale: Tensor
    missing: Tensor
    is_marked: Tensor
    codes: Tensor
    marked: Tensor
    marks: Tensor

    def absent(self, points: Tensor) -> Tensor:
        """Which numbers are missing, (K, N)."""
        return (points[:, self.missing].T > 0) & self.is_marked


def places_of(parts: Sequence[Part], device: torch.device) -> Places:
    """Where the inputs of columns stand."""
    of_numbers = [part for part in parts if part.number is not None]
    marks = [(place, part.missing) for place, part in enumerate(parts) if part.missing is not None]
    codes = [part.codes for part in parts if part.number is None]
    most = max(map(len, codes), default=1)

    def whole(values: Sequence[object]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    def exact(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

    return Places(
        columns=len(parts),
        numbers=whole([part.number for part in of_numbers]),
        center=exact([part.center for part in of_numbers]),
        scale=exact([part.scale for part in of_numbers]),
        missing=whole([part.number if part.missing is None else part.missing for part in of_numbers]),
        is_marked=torch.tensor([part.missing is not None for part in of_numbers], device=device)[:, None].bool(),
        codes=whole([(*own, *own[-1:] * (most - len(own))) for own in codes]).reshape(len(codes), most),
        marked=whole([place for place, _ in marks]),
        marks=whole([mark for _, mark in marks]),
    )


def decimals(x: Tensor, center: float | Tensor, scale: float | Tensor) -> Tensor:
    """Decimals of center + scale · x, (..., N): 2 of 0.25, 0 of 3, −1 of 40; `_MANY` where float32 cannot tell.

    Args:
        x: standardised numbers, (..., N).
        center: of each number, in float64 (..., 1), or of all.
        scale: likewise.

    >>> decimals(torch.tensor([0.25, 3.0, 40.0, 1 / 3]), 0.0, 1.0)
    tensor([ 2.,  0., -1.,  9.], dtype=torch.float64)
    """
    x = x.double()
    value = center + scale * x
    doubt = _ROUNDING * scale * x.abs().clamp_min(1)
    places = torch.tensor(_DECIMALS, dtype=torch.float64, device=x.device).view(-1, *[1] * x.ndim)
    power = torch.tensor([10.0**place for place in _DECIMALS], dtype=torch.float64, device=x.device).view_as(places)
    steps, doubt = value * power, doubt * power  # (places, ..., N)
    exact = (steps.sub_(steps.round()).abs_() <= doubt).logical_and_(20 * doubt < 1)
    return torch.where(exact, places, _MANY).amin(0)


@dataclass(frozen=True, eq=False)
class Seen:
    """How often training rows had a value.

    Attributes:
        known: distinct training values of each number, ascending, (numbers, V), the largest number at the end; none of
            numbers that hardly repeat.
        count: training rows that have them, (numbers, V).
        repeats: whether a number is known by its values, (numbers,).
        codes_count: training rows whose input column is above 0, (P,).
        rows: T.
    """

    stores = Stores()

    known: Tensor
    count: Tensor
    repeats: Tensor
    codes_count: Tensor
    rows: int

    def values(self, points: Tensor, places: Places, itself: int = 0) -> Tensor:
        """−log of the share of training rows with the same value, (numbers, N); −inf where values hardly repeat."""
        if not len(places.numbers):
            return points.new_zeros(0, len(points), dtype=torch.float64)
        values = points[:, places.numbers].T.to(self.known).contiguous()
        place = torch.searchsorted(self.known, values).clamp_max(self.known.shape[1] - 1)
        same = self.known.gather(1, place) == values
        count = torch.where(same, self.count.gather(1, place), 0)
        return self._surprise(count - itself).masked_fill(~self.repeats[:, None], -torch.inf)

    def codes(self, points: Tensor, places: Places, itself: int = 0) -> Tensor:
        """−log of the share of training rows with the same level, (categories, N)."""
        if not len(places.codes):
            return points.new_zeros(0, len(points), dtype=torch.float64)
        highest = points[:, places.codes].argmax(2).T  # the first of equal ones, as a repeated code is
        return self._surprise(self.codes_count[places.codes.gather(1, highest)] - itself)

    def blank(self, points: Tensor, places: Places, itself: int = 0) -> Tensor:
        """−log of the share of training rows without a value where a row has none, else 0, (columns, N)."""
        found = points.new_zeros(places.columns, len(points), dtype=torch.float64)
        surprise = self._surprise(self.codes_count[places.marks] - itself)[:, None]
        found[places.marked] = torch.where(points[:, places.marks].T > 0, surprise, 0.0)
        return found

    def _surprise(self, count: Tensor) -> Tensor:
        return -((count.double().clamp_min(0) + 0.5) / (self.rows + 1)).log()


def fit_seen(points: Tensor, parts: Sequence[Part]) -> Seen:
    """Count the values of training points (T, P)."""
    found = []
    for part in parts:
        if part.number is not None:
            own = points[:, part.number]
            present = own if part.missing is None else own[points[:, part.missing] == 0]
            found.append(present.unique(return_counts=True))
    known = [len(values) <= _MOST_VALUES for values, _ in found]
    width = max([len(values) for (values, _), is_known in zip(found, known, strict=True) if is_known], default=1)
    table = points.new_full((len(found), max(width, 1)), torch.finfo(points.dtype).max)
    count = torch.zeros_like(table, dtype=torch.long)
    for row, ((values, times), is_known) in enumerate(zip(found, known, strict=True)):
        if is_known:
            table[row, : len(values)], count[row, : len(values)] = values, times
    repeats = torch.tensor(known, dtype=torch.bool, device=points.device)
    return Seen(table, count, repeats, (points > 0).sum(0), len(points))


@dataclass(frozen=True, eq=False)
class Likeness:
    """What a number is expected to be, given all other columns: a Gaussian copula with a shrunk correlation.

    A number enters as the logit of its rank, the difference of its surprises above and below, which skew and outliers
    do not disturb; codes enter as they are. With the inverse Ω of the correlation, the residual of a number given the
    others is (Ω z)_j/√Ω_jj: all regressions at once.

    Attributes:
        numbers: how many.
        others: input columns of the codes that they are compared with.
        center: mean of all of these, (D,).
        scale: their standard deviation, (D,).
        precision: Ω, (D, D).
    """

    stores = Stores()

    numbers: int
    others: Tensor
    center: Tensor
    scale: Tensor
    precision: Tensor

    def compared(self, edges: Tensor, points: Tensor) -> Tensor:
        """What is compared, (D, N), from surprises above and below, (2 numbers, N), and points."""
        above, below = edges.chunk(2) if self.numbers else (edges, edges)
        return torch.cat([above - below, points[:, self.others].T.double()])

    def __call__(self, compared: Tensor) -> Tensor:
        """How far each number is from what the others let expect, (numbers, N), in deviations."""
        standard = (compared - self.center[:, None]) / self.scale[:, None]
        residual = (self.precision @ standard) / self.precision.diagonal().sqrt()[:, None]
        return residual[: self.numbers].abs()

    def learnt(self, compared: Tensor) -> Likeness:
        """The same with center, scale and precision of other training rows, (D, T)."""
        size, rows = compared.shape
        if not rows:
            return self
        center = compared.mean(1)
        scale = compared.std(1, correction=0)
        scale = torch.where(scale > 1e-9, scale, 1.0)
        standard = (compared - center[:, None]) / scale[:, None]
        share = min(0.5, max(0.01, 0.1 * size / rows))  # towards independence: few rows tell little of many columns
        correlation = (1 - share) * standard @ standard.T / rows
        correlation.diagonal().fill_(1.0)
        return replace(self, center=center, scale=scale, precision=torch.linalg.inv(correlation))


def fit_likeness(edges: Tensor, points: Tensor, parts: Sequence[Part], copies: Sequence[int] = ()) -> Likeness:
    """Learn how columns go together; arguments as in `Likeness.compared`, of training rows.

    No number is compared with inputs that are copies of one.
    """
    numbers = {part.number for part in parts if part.number is not None}
    share = (points > 0).double().mean(0)
    common = [
        place
        for place in (share - 0.5).abs().argsort().tolist()  # those that tell most first
        if place not in numbers and place not in copies and _COMMON < share[place] < 1 - _COMMON
    ]
    others = torch.tensor(sorted(common[: max(0, _MOST_OTHERS - len(numbers))]), dtype=torch.long, device=points.device)
    nothing = points.new_zeros(0, dtype=torch.float64)
    plain = Likeness(len(numbers), others, nothing, nothing, nothing)
    return plain.learnt(plain.compared(edges, points))
