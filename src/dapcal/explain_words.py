"""An explanation in words: what the command line and estimators say of one row alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dapcal.amounts import amount
from dapcal.explain import Explanation
from dapcal.visible import brief

COLUMNS = 6  # of a table that are shown


def verdict(found: Explanation, alpha: float) -> str:
    """Whether the row is out of distribution, why, and how far it lies from the training rows."""
    said = f"yes, {found.reason}" if found.reason else "yes" if found.p_value <= alpha else "no"
    reach = found.farthest
    radius = "" if reach.radius is None else f", where up to {amount(reach.radius, 3)} (the radius) is usual"
    return (
        f"Out of distribution: {said} (p-value {found.p_value:.3g}); it lies {amount(reach.raw, 3)} from the training "
        f"rows in the space of {reach.space}{radius}"
    )


def clues(found: Explanation) -> list[str]:
    """The evidence piece by piece; files of earlier versions have no p-values for them."""
    told = [f"{clue.name} {clue.p_value:.3g}" for clue in found.evidence if clue.p_value is not None]
    return [f"p-values piece by piece: {', '.join(told)}"] if told else []


def far(found: Explanation, shown: Mapping[str, str]) -> str:
    """The columns that are further from the neighbours than usual, with the row's values where they are known."""
    away = [column for column in found.columns if column.is_far or column.is_outside]
    if not away:
        return "No column alone is far from the nearest training rows."
    texts = []
    for column in away[:COLUMNS]:
        value = f" = {brief(shown[column.name])}" if column.name in shown else ""
        outside = ", outside all training values" if column.is_outside else ""
        texts.append(f"`{brief(column.name)}`{value} ({100 * column.share:.0f} % of the distance{outside})")
    return "Far columns: " + "; ".join(texts)


def likeliest(probabilities: Iterable[float], classes: Sequence[str]) -> str:
    """The three most likely classes."""
    best = sorted(zip(probabilities, classes, strict=True), reverse=True)[:3]
    return ", ".join(f"{brief(name)} {100 * p:.1f} %" for p, name in best)


def ranges(means: Iterable[float], lowers: Iterable[float], uppers: Iterable[float]) -> str:
    """Expected targets and their intervals of `LEVEL`."""
    ends = zip(means, lowers, uppers, strict=True)
    return ", ".join(
        f"{amount(mean)} (95 % interval {amount(lower)} to {amount(upper)})" for mean, lower, upper in ends
    )


def grid(
    found: Explanation, rows: Sequence[Mapping[str, str]], labels: Sequence[str], targets: Sequence[str], target: str
) -> list[list[str]]:
    """The row above its nearest training rows, the columns that differ most first; the first line is the header.

    Args:
        found: whose columns they are.
        rows: values by column, of the row itself and of its neighbours.
        labels: what they are called.
        targets: of each, as text.
        target: what that column is called.
    """
    names = ([column.name for column in found.columns if column.name in rows[0]] or list(rows[0]))[:COLUMNS]
    lines = [["", *names, target]]
    lines += [
        [label, *(row[name] for name in names), value] for label, row, value in zip(labels, rows, targets, strict=True)
    ]
    return [list(map(brief, line)) for line in lines]


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Columns below each other."""
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    return ["  ".join(f"{text:<{width}}" for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
