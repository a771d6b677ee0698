"""`dapcal explain`: why a row's prediction is what it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dapcal.cli.common import Device, Factory, Json, Key, Quiet, checked, given, output, too_few, typer
from dapcal.records import ALPHA
from dapcal.visible import brief

if TYPE_CHECKING:
    from torch import Tensor

    from dapcal.explain import Answer, Explanation, Neighbours
    from dapcal.models.subject import Subject


def explain(
    model: Annotated[Path, typer.Argument(readable=False, help="What `dapcal fit` or `dapcal calibrate` wrote.")],
    data: Annotated[Path, typer.Argument(readable=False, help="Table or arrays that hold the row.")],
    row: Annotated[int, typer.Option(min=1, help="Which row, counted from 1 without the header.")] = 1,
    neighbours: Annotated[int, typer.Option(min=1, help="How many training rows to show.")] = 5,
    factory: Factory = None,
    key: Key = None,
    device: Device = "cpu",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show the training rows nearest to a row, which of its columns are far, and how distance changed the prediction.

    Example: dapcal explain house.dap new.csv --row 7
    """
    with output(as_json, quiet) as said, given(data) as data:
        from dapcal.explain import explain as explained
        from dapcal.models import load

        loaded = load(model, factory, checked(device), key)
        rows = loaded.inputs(data, row)
        if len(rows) < row:
            raise ValueError(f"Expected --row between 1 and {len(rows)} (rows of {data}), got {row}")
        subject = loaded.subject(model.name, None, "")
        too_few(said, len(subject.calibrated.evidence.held_out), ALPHA)
        x = rows[row - 1 :]
        found = explained(subject.calibrated, subject.train.x, x, subject.features, neighbours)
        cells = {
            "missing": subject.missing(x)[0] if subject.missing is not None else [],
            "unusual": subject.unusual(x)[0] if subject.unusual is not None else {},
        }
        said.result({"row": row, **_told(subject, found, x), **cells}, _words(subject, found, x, row))


def _near(found: Explanation, x: Tensor) -> Neighbours:
    """The nearest training rows: between inputs, or of token ids, which have no distance, where it is measured."""
    return found.nearest if x.is_floating_point() else found.farthest.nearest


def _told(subject: Subject, found: Explanation, x: Tensor) -> dict[str, Any]:
    """As JSON: predictions in the target's unit or by the names of classes, training rows as people see them."""
    near = _near(found, x)
    shown = subject.show(subject.train.x[list(near.rows)])
    neighbours = zip(near.distances, _targets(subject, list(near.rows)), shown, strict=True)
    return {
        **found.as_json(),
        "before": _plain(subject, found.before),
        "after": _plain(subject, found.after),
        "neighbours": [
            {"distance": distance, "target": target, "columns": one if isinstance(one, dict) else None}
            for distance, target, one in neighbours
        ],
    }


def _plain(subject: Subject, answer: Answer) -> dict[str, Any]:
    if subject.classes:
        epistemic = list(answer.epistemic) if subject.has_labels else answer.epistemic[0]
        return {"probabilities": dict(zip(subject.classes, answer.mean, strict=True)), "epistemic": epistemic}
    unit = subject.unit
    mean, ends = unit.means(answer.mean), {"lower": answer.lower, "upper": answer.upper}
    deviations = [value**0.5 for value in answer.epistemic]  # as `predict` writes it
    return {
        "mean": mean.tolist(),
        **{name: unit.amounts(values).tolist() for name, values in ends.items()},
        "deviation": unit.widths(answer.deviation, mean).tolist(),
        "epistemic": unit.widths(deviations, mean).tolist(),
    }


def _words(subject: Subject, found: Explanation, x: Tensor, row: int) -> str:
    from dapcal import explain_words as words

    shown = subject.show(x)[0]
    lines = [
        f"Row {row}: `{brief(subject.target)}` {_answer(subject, found.after)}",
        f"Before distances count: {_answer(subject, found.before)}",
        words.verdict(found, ALPHA),
        *words.clues(found),
        *_cells(subject, x),
        # token ids are not columns
        *([words.far(found, shown if isinstance(shown, dict) else {})] if x.is_floating_point() else []),
        "",
        *words.aligned(_neighbours(subject, found, x)),
    ]
    return "\n".join(lines)


def _cells(subject: Subject, x: Tensor) -> list[str]:
    """The cells of a table's row that are missing, and the most unusual ones."""
    told = []
    if subject.missing is not None and (missing := subject.missing(x)[0]):
        told.append(f"Missing: {', '.join(f'`{brief(name)}`' for name in missing)}")
    if subject.unusual is not None and (unusual := subject.unusual(x)[0]):
        told.append(
            "Most unusual by itself: " + ", ".join(f"`{brief(name)}` ({what})" for name, what in unusual.items())
        )
    return told


def _answer(subject: Subject, answer: Answer) -> str:
    from dapcal.explain_words import likeliest, ranges

    if subject.classes:
        return likeliest(answer.mean, subject.classes)
    plain = _plain(subject, answer)
    return ranges(plain["mean"], plain["lower"], plain["upper"])


def _neighbours(subject: Subject, found: Explanation, x: Tensor) -> list[list[str]]:
    """The row above its nearest training rows."""
    from dapcal.amounts import amount
    from dapcal.explain_words import grid

    near = _near(found, x)
    train = subject.train.x[list(near.rows)]
    rows = [one if isinstance(one, dict) else {} for one in (*subject.show(x), *subject.show(train))]
    labels = ["this row", *(f"training row at {amount(distance, 3)}" for distance in near.distances)]
    return grid(found, rows, labels, ["?", *_targets(subject, list(near.rows))], subject.target)


def _targets(subject: Subject, rows: list[int]) -> list[str]:
    from dapcal.amounts import amount

    y = subject.train.y[rows]
    if subject.has_labels:
        return [", ".join(n for n, there in zip(subject.classes, row, strict=True) if there) or "none" for row in y]
    if subject.classes:
        return [subject.classes[label] for label in y.tolist()]
    return [", ".join(amount(value) for value in values) for values in subject.unit.amounts(y.cpu()).tolist()]
