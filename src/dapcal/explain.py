"""Why a prediction is what it is: the nearest training inputs, the columns that are far, and what distance changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dapcal.calibrate import Calibrated
from dapcal.data import check_inputs
from dapcal.distances import FittedSpace
from dapcal.distances.neighbors import TorchIndex
from dapcal.distances.projectors import Identity, project
from dapcal.evidence import Piece
from dapcal.predictive import Prediction
from dapcal.types import ALPHA, LEVEL, NeighborIndex

_ORDINARY = 0.05  # chance that a training input itself has any far column, about
_MOST_SAMPLED = 1000  # training inputs that "usual" is read from


def explain(
    calibrated: Calibrated, train_x: Tensor, x: Tensor, features: Sequence[str] = (), neighbours: int = 5
) -> Explanation:
    """Explain the prediction at one input.

    Args:
        calibrated: what predicts.
        train_x: the training inputs (T, ...) it was calibrated with, in the same order.
        x: one input (1, ...).
        features: for flat inputs the name of the table's column that each input column comes from; input columns of
            one name (one-hot codes) count together.
        neighbours: how many training inputs to name.
    """
    return explainer(calibrated, train_x, features, neighbours)(x)


def explainer(calibrated: Calibrated, train_x: Tensor, features: Sequence[str] = (), neighbours: int = 5) -> Explainer:
    """What explaining several inputs shares; arguments as in `explain`."""
    check_inputs(train_x, "train_x", like=calibrated.example)
    if not 1 <= neighbours <= len(train_x):
        raise ValueError(f"Expected `neighbours` between 1 and {len(train_x)} (training inputs), got {neighbours}")
    for space in calibrated.distance.spaces:
        points = getattr(_index_of(space), "points", train_x)
        if len(points) != len(train_x):
            raise ValueError(
                f"Expected `train_x` as the {len(points)} training inputs of the calibration, got {len(train_x)}; "
                "give all of them, in the same order"
            )
    names, groups = _grouped(tuple(features), train_x)
    index = _input_index(calibrated, train_x)
    usual = _usual(index, Identity()(train_x), groups, len(names), neighbours)
    return Explainer(calibrated, train_x, names, groups, neighbours, index, usual)


@dataclass(frozen=True)
class Neighbours:
    """The nearest training inputs in one space, nearest first."""

    space: str
    rows: tuple[int, ...]  # places in the training inputs
    distances: tuple[float, ...]


@dataclass(frozen=True)
class Reach:
    """How far the input lies in one of the spaces that distances are measured in."""

    space: str
    raw: float
    radius: float | None  # raw distance up to which nothing is far
    pre_distance: float  # d0
    nearest: Neighbours  # in this space; in that of the inputs where its metric has no neighbours


@dataclass(frozen=True)
class Clue:
    """One piece of the evidence that the input is out of distribution."""

    name: str  # "doubt", or the space that a distance is measured in
    standardised: float  # 0 is the median of held-out inputs, 1 their 95 % quantile
    p_value: float | None  # its own; None in files of earlier versions


@dataclass(frozen=True)
class Column:
    """How a column of the table differs from those of the nearest training inputs."""

    name: str
    share: float  # of the squared distance to them
    difference: float  # root mean square of the differences to them
    usual: float  # what a training input differs from its own neighbours at most, as a rule
    is_far: bool  # more than usual
    is_outside: bool  # under the smallest or over the largest training value
    percentile: float | None  # share of training values below, ties by half; None for several input columns
    seen: float  # share of training inputs with this very value


@dataclass(frozen=True)
class Answer:
    """A prediction in plain numbers; `deviation`, `lower` and `upper` are empty in classification."""

    mean: tuple[float, ...]  # class probabilities, or expected targets
    deviation: tuple[float, ...]
    lower: tuple[float, ...]  # ends of the interval of `LEVEL`
    upper: tuple[float, ...]
    epistemic: tuple[float, ...]  # variance that comes from missing data


@dataclass(frozen=True)
class Explanation:
    """Everything about one prediction, as plain values."""

    before: Answer  # the posterior as it was
    after: Answer  # adjusted to the input's distance
    pre_distance: float  # d0, the largest of the spaces
    distance: float  # d = g(φ) d0
    ood_score: float
    p_value: float
    reason: str  # why it is flagged, empty where it is not (`Prediction.reasons`)
    evidence: tuple[Clue, ...]  # what `ood_score` adds up, each with its weight
    spaces: tuple[Reach, ...]
    nearest: Neighbours  # between inputs
    columns: tuple[Column, ...]  # flat inputs: by their share, largest first

    @property
    def farthest(self) -> Reach:
        """The space that decides: of the largest d0, among equals of the largest distance in units of the radius.

        Where no space counts, that of the inputs, in which nothing is far.
        """
        if not self.spaces:
            return Reach(self.nearest.space, self.nearest.distances[0], None, 0.0, self.nearest)
        return max(self.spaces, key=lambda space: (space.pre_distance, space.raw / (space.radius or 1.0)))

    def as_json(self) -> dict[str, Any]:
        """Dictionaries, lists, strings and finite numbers alone."""
        return _lists(asdict(self))


@dataclass(frozen=True, eq=False)
class Explainer:
    """Explains one input at a time.

    Attributes:
        calibrated: what predicts.
        train_x: training inputs (T, ...).
        names: of the table's columns, G; none where inputs are not flat.
        groups: which of them each input column belongs to, (P,).
        neighbours: how many training inputs to name.
        index: of the inputs.
        usual: what a training input differs from its own neighbours at most, as a rule, (G,).
    """

    calibrated: Calibrated
    train_x: Tensor
    names: tuple[str, ...]
    groups: Tensor
    neighbours: int
    index: NeighborIndex
    usual: Tensor

    def __call__(self, x: Tensor, alpha: float = ALPHA) -> Explanation:
        """Explain the prediction at one input (1, ...), and why it is flagged at the level `alpha`."""
        check_inputs(x, "x", like=self.calibrated.example)
        if len(x) != 1:
            raise ValueError(f"Expected one input (1, ...) in `x`, got {len(x)}; explain them one by one, x[i : i + 1]")
        prediction = self.calibrated(x)
        nearest = _neighbours("inputs", self.index, Identity()(x), self.neighbours)
        return Explanation(
            before=_answer(prediction.base),
            after=_answer(prediction),
            pre_distance=float(prediction.pre_distance[0]),
            distance=float(prediction.distance[0]),
            ood_score=float(prediction.ood_score[0]),
            p_value=float(prediction.ood_p_value[0]),
            reason=prediction.reasons(alpha)[0],
            evidence=tuple(_clue(name, piece) for name, piece in prediction.evidence.items()),
            spaces=tuple(self._reach(space, x, nearest) for space in self.calibrated.distance.spaces),
            nearest=nearest,
            columns=self._columns(x, nearest) if self.names else (),
        )

    def _reach(self, space: FittedSpace, x: Tensor, fallback: Neighbours) -> Reach:
        raw = space.raw(x)
        index = _index_of(space)
        near = fallback
        if index is not None:
            near = _neighbours(space.name, index, project(space.projector, x), self.neighbours)
        radius = None if space.radius is None else space.radius.start
        return Reach(space.name, float(raw[0]), radius, float(space.excess(raw)[0]), near)

    def _columns(self, x: Tensor, nearest: Neighbours) -> tuple[Column, ...]:
        train, flat = Identity()(self.train_x), Identity()(x.to(self.train_x.device))
        rows = torch.tensor([nearest.rows], device=train.device)
        squared = _squared_differences(train, flat, rows, self.groups, len(self.names))[0]
        total = max(float(squared.sum()), torch.finfo(squared.dtype).tiny)
        found = []
        for group, name in enumerate(self.names):
            own = (self.groups == group).nonzero().flatten().to(train.device)
            values, value = train[:, own], flat[:, own]
            difference, usual = float(squared[group].sqrt()), float(self.usual[group])
            found.append(
                Column(
                    name=name,
                    share=float(squared[group]) / total,
                    difference=difference,
                    usual=usual,
                    is_far=difference > usual,
                    is_outside=bool(((value < values.amin(0)) | (value > values.amax(0))).any()),
                    percentile=_percentile(values, value) if len(own) == 1 else None,
                    seen=float((values == value).all(1).double().mean()),
                )
            )
        return tuple(sorted(found, key=lambda column: -column.share))


@dataclass(frozen=True, eq=False)
class FarColumns:
    """The columns in which rows differ from their nearest training rows, of many rows at once.

    Attributes:
        train: training rows (T, P), of many rows some.
        names: of the table's columns, G.
        groups: which of them each input column belongs to, (P,).
        neighbours: how many training rows a row is compared with.
        index: of `train`.
        usual: what a training row differs from its own neighbours at most, as a rule, (G,).
    """

    train: Tensor
    names: tuple[str, ...]
    groups: Tensor
    neighbours: int
    index: NeighborIndex
    usual: Tensor

    def __call__(self, x: Tensor, most: int = 3) -> list[dict[str, bool]]:
        """For every row (N, P) the columns that are further than usual, largest share of the distance first.

        Where none is, the one with the largest share alone. The values say whether a column is further than usual.
        """
        x = Identity()(x.to(self.train.device))
        near = self.index.query(x, self.neighbours)[1].to(x.device)
        squared = _squared_differences(self.train, x, near, self.groups, len(self.names))  # (N, G)
        beyond = ((x < self.train.amin(0)) | (x > self.train.amax(0))).cpu()
        outside = torch.zeros(squared.shape).index_add(1, self.groups.cpu(), beyond.float()) > 0
        is_far = (squared.sqrt() > self.usual) | outside
        found = []
        for far, order in zip(
            is_far.tolist(), squared.argsort(dim=1, descending=True, stable=True).tolist(), strict=True
        ):
            places = [place for place in order if far[place]][:most]
            found.append({self.names[place]: far[place] for place in places or order[:1]})
        return found


def far_columns(train_x: Tensor, features: Sequence[str], neighbours: int = 5, most: int = 5000) -> FarColumns:
    """What is usual for training inputs (T, P), of which at most `most` are looked at; `features` as in `explain`."""
    train = Identity()(train_x)
    if len(train) > most:
        rows = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:most].sort().values
        train = train[rows.to(train.device)]
    names, groups = _grouped(tuple(features), train)
    index, k = TorchIndex(train), min(neighbours, len(train))
    return FarColumns(train, names, groups, k, index, _usual(index, train, groups, len(names), k))


def _clue(name: str, piece: Piece) -> Clue:
    p_value = float(piece.p_value[0])
    return Clue(name, float(piece.standardised[0]), None if math.isnan(p_value) else p_value)


def _answer(prediction: Prediction) -> Answer:
    def plain(values: Tensor) -> tuple[float, ...]:
        return tuple(values.double().flatten().tolist())

    if prediction.likelihood.task != "regression":
        return Answer(plain(prediction.mean), (), (), (), plain(prediction.epistemic))
    lower, upper = prediction.interval(LEVEL)
    deviation = prediction.variance.double().sqrt()
    return Answer(plain(prediction.mean), plain(deviation), plain(lower), plain(upper), plain(prediction.epistemic))


def _neighbours(space: str, index: NeighborIndex, points: Tensor, k: int) -> Neighbours:
    distances, rows = index.query(points, k)
    return Neighbours(space, tuple(rows[0].tolist()), tuple(distances[0].double().tolist()))


def _index_of(space: FittedSpace) -> NeighborIndex | None:
    index: NeighborIndex | None = getattr(space.metric, "index", None)
    return index


def _input_index(calibrated: Calibrated, train_x: Tensor) -> NeighborIndex:
    """That of a space of the inputs themselves, or a new one."""
    for space in calibrated.distance.spaces:
        index = _index_of(space)
        if isinstance(space.projector, Identity) and index is not None:
            return index
    return TorchIndex(Identity()(train_x))


def _grouped(features: tuple[str, ...], train_x: Tensor) -> tuple[tuple[str, ...], Tensor]:
    """The table's columns, and which of them each input column belongs to; none where inputs are not flat."""
    if train_x.ndim != 2:
        if features:
            raise ValueError(f"Expected flat inputs (N, P) with `features`, got {tuple(train_x.shape)}; leave them out")
        return (), torch.empty(0, dtype=torch.long)
    columns = train_x.shape[1]
    features = features or tuple(f"column {number}" for number in range(1, columns + 1))
    if len(features) != columns:
        raise ValueError(
            f"Expected {columns} `features` (one name per input column), got {len(features)}; repeat the name of a "
            "column that has several codes"
        )
    names = tuple(dict.fromkeys(features))
    places = {name: place for place, name in enumerate(names)}
    return names, torch.tensor([places[name] for name in features])


def _usual(index: NeighborIndex, train: Tensor, groups: Tensor, count: int, neighbours: int) -> Tensor:
    """Per column, what training inputs differ from their own neighbours, leaving themselves out: a high quantile, (G,).

    The quantile is 1 − 0.05/G, so that about one ordinary input in twenty has any far column at all.
    """
    k = min(neighbours, len(train) - 1)
    if not count or not k:
        return torch.zeros(count)
    sample = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:_MOST_SAMPLED].to(train.device)
    rows = index.query(train[sample], k + 1)[1].to(train.device)
    others = rows != sample[:, None]
    others[others.all(1), -1] = False  # among duplicates an input may not meet itself
    squared = _squared_differences(train, train[sample], rows[others].reshape(len(sample), k), groups, count)
    return squared.sqrt().quantile(1 - _ORDINARY / count, dim=0)


def _squared_differences(train: Tensor, x: Tensor, rows: Tensor, groups: Tensor, count: int) -> Tensor:
    """Mean over neighbours (N, k) of the squared difference in every group of columns, (N, G)."""
    squared = torch.zeros_like(x)  # (N, P)
    for near in rows.T:
        squared += (x - train[near]) ** 2 / len(rows.T)
    return squared.new_zeros(len(x), count).index_add(1, groups.to(squared.device), squared).double().cpu()


def _percentile(values: Tensor, value: Tensor) -> float:
    """Share of training values (T, 1) below, those that are equal by half."""
    return float((values < value).double().mean() + (values == value).double().mean() / 2)


def _lists(value: Any) -> Any:
    """Tuples as lists, as JSON reads them back."""
    if isinstance(value, dict):
        return {key: _lists(part) for key, part in value.items()}
    return [_lists(part) for part in value] if isinstance(value, tuple | list) else value
