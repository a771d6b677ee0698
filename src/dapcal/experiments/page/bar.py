"""The bar that our default is held to on images, passed or failed by result files alone.

Of one network, and of ensembles: the highest mean AUROC of all methods over all pairs; nowhere more than one point
below the best of them beyond two standard errors; lower NLL and ECE than the network (the ensemble) alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dapcal.experiments.page.cells import ERRORS, NOTHING, Number, show, table
from dapcal.experiments.page.files import ImageResults
from dapcal.experiments.page.pairs import (
    Compared,
    Pair,
    Values,
    methods_of,
    of_pairs,
    pairs_of,
    shared,
    spread,
)

POINT = 1.0  # how far below the best of all our default may be
WORDS = {True: "yes", False: "**no**", None: "not known yet"}


class Kind(NamedTuple):
    """Whom the bar is for."""

    title: str
    ours: str
    alone: str
    ensemble: bool


KINDS = (
    Kind("One trained network", "One network + DAP, ours", "MAP", ensemble=False),
    Kind("Ensembles", "DE + DAP, ours", "DE", ensemble=True),
)


class Beside(NamedTuple):
    """Our number beside another, under the seeds that both have."""

    ours: Number
    other: Number
    name: str  # of the other
    difference: Number  # ours less the other


class Verdict(NamedTuple):
    """What holds of the bar; None: not known yet, as something was not measured."""

    kind: Kind
    mean: tuple[Number | None, str, Number | None]  # ours, the best other method and its mean, over `pairs`
    pairs: tuple[Pair, ...]  # that ours was measured on
    highest: bool | None
    near_best: dict[Pair, Beside | None]
    lower: dict[tuple[str, str], Beside | None]  # by set and metric

    @property
    def nowhere_below(self) -> bool | None:
        """Whether no pair is more than a point below the best."""
        return _all(None if one is None else not below(one) for one in self.near_best.values())

    def lower_in(self, metric: str) -> bool | None:
        """Whether the metric is lower than that of the posterior alone on every set."""
        own = [one for (_, name), one in self.lower.items() if name == metric]
        return _all(None if one is None else one.difference.mean < 0 for one in own)

    @property
    def passed(self) -> bool | None:
        """All of it."""
        return _all((self.highest, self.nowhere_below, self.lower_in("NLL"), self.lower_in("ECE")))


def verdict(kind: Kind, images: Sequence[ImageResults]) -> Verdict | None:
    """What the files say; None where neither our default nor the posterior alone is in them."""
    methods = {one.name: one for one in methods_of(images) if one.ensemble == kind.ensemble}
    if kind.ours not in methods or kind.alone not in methods:
        return None
    pairs, sets = pairs_of(images), [found.settings["inside"] for found in images]
    ours, alone = methods.pop(kind.ours), methods[kind.alone]
    others = list(methods.values())
    missing = ours.missing(pairs)
    known = [pair for pair in pairs if pair not in missing]
    means = {one.name: found for one in others if (found := of_pairs(one, known, "auroc")) is not None}
    best = max(means, key=lambda name: means[name].mean, default="")
    own = of_pairs(ours, known, "auroc")
    ahead = None if own is None or not best else own.mean > means[best].mean
    columns = (("NLL", "nll", 1.0), ("ECE", "ece", 100.0))
    return Verdict(
        kind, (own, best, means.get(best)), tuple(known),
        None if missing else ahead,
        {pair: _best_at(pair, ours, others) for pair in pairs},
        {
            (inside, label): _beside(alone.name, ours.test(inside, key, scale), alone.test(inside, key, scale))
            for inside in sets for label, key, scale in columns
        },
    )  # fmt: skip


def below(found: Beside) -> bool:
    """More than a point below the best, and than two standard errors of the difference (where there are any)."""
    difference, error = found.difference
    return -difference > max(POINT, 0.0 if error != error else ERRORS * error)


def section(images: Sequence[ImageResults]) -> Iterable[str]:
    """What holds and what does not, one after the other."""
    for kind in KINDS:
        if found := verdict(kind, images):
            yield f"### {kind.title}: does “{kind.ours}” pass?"
            yield table(["", "holds", "by"], checks(found), words=3)
            yield table(
                ["pair", kind.ours, "best other", "difference", "holds"],
                [
                    [str(pair), *_line(one, 1, one is not None and below(one), named=True)]
                    for pair, one in found.near_best.items()
                ],
            )
            yield table(
                ["", kind.ours, kind.alone, "difference", "lower"],
                [
                    [f"{name}, {inside}", *_line(one, 3 if name == "NLL" else 1, _not_lower(one))]
                    for (inside, name), one in found.lower.items()
                ],
            )
            yield (
                "AUROC and ECE in per cent. Differences are under the seeds that both have, with their standard error "
                "(none with one seed: then a point alone decides). “Best other” is the best of all other methods of "
                "the kind at that pair, also where it is one of ours."
            )


def checks(found: Verdict) -> list[list[str]]:
    """The bar, point by point."""
    (ours, best, other), kind = found.mean, found.kind
    over = f"all {len(found.near_best)} pairs"
    if len(found.pairs) < len(found.near_best):
        over = f"{len(found.pairs)} of {len(found.near_best)} pairs, those that it was measured on"
    known = [one for one in found.near_best.values() if one is not None]
    failed = sum(below(one) for one in known)
    return [
        ["highest mean AUROC of all", WORDS[found.highest], f"{show(ours, 1)}; {best} {show(other, 1)}; over {over}"],
        [
            "nowhere more than one point below the best, beyond two standard errors", WORDS[found.nowhere_below],
            f"below on {failed} of {len(known)} pairs measured, of {len(found.near_best)}",
        ],
        *(
            [f"lower {name} than {kind.alone}", WORDS[found.lower_in(name)], _sets(found, name)]
            for name in ("NLL", "ECE")
        ),
        ["**all of it**", WORDS[found.passed], ""],
    ]  # fmt: skip


def _sets(found: Verdict, name: str) -> str:
    own = [one for (_, metric), one in found.lower.items() if metric == name]
    known = [one for one in own if one is not None]
    return f"lower on {sum(one.difference.mean < 0 for one in known)} of {len(known)} sets measured, of {len(own)}"


def _best_at(pair: Pair, ours: Compared, others: Sequence[Compared]) -> Beside | None:
    """The best other method at a pair, under the seeds of ours that it has."""
    own = ours.detection(pair, "auroc")
    beside = [found for one in others if (found := _beside(one.name, own, one.detection(pair, "auroc")))]
    return min(beside, key=lambda found: found.difference.mean, default=None)


def _beside(name: str, ours: Values, other: Values) -> Beside | None:
    keys = shared([ours, other])
    if not keys:
        return None
    differences = [ours[key] - other[key] for key in keys]
    return Beside(spread([ours[k] for k in keys]), spread([other[k] for k in keys]), name, spread(differences))


def _line(found: Beside | None, digits: int, fails: bool, named: bool = False) -> list[str]:
    if found is None:
        return [*[NOTHING] * 3, WORDS[None]]
    other = show(found.other, digits) + (f" ({found.name})" if named else "")
    return [show(found.ours, digits), other, show(found.difference, digits, sign=True), WORDS[not fails]]


def _not_lower(found: Beside | None) -> bool:
    return found is not None and not found.difference.mean < 0


def _all(parts: Iterable[bool | None]) -> bool | None:
    """False where one is, else None where one is not known."""
    found = list(parts)
    return False if False in found else None if None in found or not found else True
