"""`dapcal fit`: from a table to a calibrated model in one file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from dapcal.cli.common import (
    MAX_SEED,
    Device,
    Json,
    Quiet,
    Sign,
    check_key,
    checked,
    few_judges,
    given,
    output,
    too_few,
    typer,
    writable,
)
from dapcal.types import ALPHA, LEVEL

if TYPE_CHECKING:
    from dapcal.models.table_summary import Summary


def fit(
    train: Annotated[
        Path, typer.Argument(readable=False, help="Table with a header: .csv, .tsv, .parquet, .xlsx, .npz, or -.")
    ],
    target: Annotated[str, typer.Option(help="Column to be predicted.")],
    out: Annotated[Path, typer.Option("--out", "-o", readable=False, help="File for the model, e.g. house.dap.")],
    task: Annotated[str | None, typer.Option(help="classification or regression; guessed from the target.")] = None,
    drop: Annotated[list[str] | None, typer.Option(help="Columns to leave out: a, or a,b; may be repeated.")] = None,
    drop_unusable: Annotated[
        bool, typer.Option("--drop-unusable", help="Leave out columns that would be refused (free text), with a note.")
    ] = False,
    category: Annotated[
        list[str] | None, typer.Option(help="Column whose numbers are names (a postcode); may be given several times.")
    ] = None,
    number: Annotated[
        list[str] | None, typer.Option(help="Column of numbers to learn even if they seem to be ids of the rows.")
    ] = None,
    posterior: Annotated[
        str | None, typer.Option(help="ensemble (by default), tabm, laplace, variational, swag or dropout.")
    ] = None,
    estimator: Annotated[
        str | None,
        typer.Option(help="Your forest or boosting model in place of networks: package.module:function returns it."),
    ] = None,
    hidden: Annotated[
        str | None, typer.Option(help="Widths of the hidden layers; by default 64,64 (tabm: 96,96).")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the rows; by default by their number.")] = None,
    validation: Annotated[float, typer.Option(help="Share of the rows that is held out for calibration.")] = 0.2,
    bounds: Annotated[
        str | None, typer.Option(help="Least and greatest value of the target, e.g. 0, or 0,100; 0, where it fits.")
    ] = None,
    weight: Annotated[
        str | None, typer.Option(help="Column that says how much a row counts in training; it is not an input.")
    ] = None,
    class_weight: Annotated[
        str | None, typer.Option(help="How much classes count in training: balanced, or e.g. yes=5,no=1.")
    ] = None,
    log: Annotated[
        bool | None,
        typer.Option("--log/--no-log", help="Learn the target's logarithm; by default where that is likelier."),
    ] = None,
    fast: Annotated[
        bool,
        typer.Option(
            "--fast", help="Skip gap cross-validation (how predictions widen far away) and training on all rows."
        ),
    ] = False,
    points: Annotated[
        int | None,
        typer.Option(min=1, help="Measure distances from at most so many training rows: predictions take less time."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of the split, initial weights and batches.")] = 0,
    sign: Sign = None,
    device: Device = "cpu",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Learn to predict a column of a table, and to know how far a row is from the training rows.

    Numbers are standardised, texts are categories, dates get the cycles of year and week, missing values an indicator.
    A fifth of the rows is held out: it calibrates φ, the radius and the p-values. Regions of the other rows are left
    out in turn, to choose what distance does to predictions. In the end all rows are learnt (--fast skips these two).

    Example: dapcal fit train.csv --target price -o house.dap
    """
    with output(as_json, quiet) as said, given(train) as train:
        from dapcal import tables
        from dapcal.models import large_tables
        from dapcal.models.table_summary import summarise, words
        from dapcal.recipes import ESTIMATOR, Recipe

        writable(out, train, *([sign] if sign else []))
        check_key(sign)
        if task not in (None, "classification", "regression"):
            raise ValueError(f"Expected --task as classification or regression, got {task!r}")
        brought = () if estimator is None else _estimators(estimator, posterior, hidden, epochs)
        recipe = Recipe(
            posterior=ESTIMATOR if brought else posterior or "ensemble",
            epochs=epochs,
            validation=validation,
            fast=fast,
            refit=not fast,
            points=points,
            seed=seed,
            device=checked(device),
        )
        if hidden is not None:
            recipe = replace(recipe, hidden=_widths(hidden))
        said.progress("reading", 0, None)
        kinds: dict[str, tables.Kind] = {
            **dict.fromkeys(category or (), "category"),
            **dict.fromkeys(number or (), "number"),
        }
        names = tables.columns_of(train)
        _check_target(target, names)
        left_out = _several(drop or (), names)
        unusable: dict[str, str] = {}
        sample = tables.sample(train, kinds, left_out, unusable, seed)
        said.progress("reading", 1, 1)
        model = large_tables.fit(
            sample,
            partial(tables.stream, train),
            target,
            task=cast(Literal["classification", "regression"] | None, task),
            recipe=recipe,
            drop=left_out,
            unusable=unusable,
            drop_unusable=drop_unusable,
            progress=said.progress,
            bounds=None if bounds is None else _bounds(bounds),
            weight=weight,
            class_weights=None if class_weight is None else _class_weights(class_weight),
            log=log,
            estimators=brought,
            numbers=number or (),
        )
        for note in model.notes:
            said.note(note)
        too_few(said, len(model.calibrated.evidence.held_out), ALPHA)
        few_judges(said, model.calibrated, LEVEL)
        summary = summarise(model)
        model.save(out, sign)
        data: dict[str, Any] = {
            "file": str(out),
            **summary.as_json(),
            "calibration": list(model.calibrated.notes),
            "gaps": None if model.gaps is None else model.gaps.as_json(),
        }
        said.result(data, f"{_numbers(summary)}\n\n{words(summary, target)}\n\nSaved to {out}")


def _estimators(name: str, posterior: str | None, hidden: str | None, epochs: int | None) -> Sequence[Any]:
    """What a function of the user's own returns; options of networks are refused beside it."""
    given = {"--posterior": posterior, "--hidden": hidden, "--epochs": epochs}
    odd = [option for option, value in given.items() if value is not None]
    if odd:
        raise ValueError(f"--estimator takes the place of networks, and {odd[0]} is an option of theirs; leave it out")
    from dapcal.models import factories

    return factories.estimators(name)


def _several(given: Sequence[str], names: Sequence[str]) -> list[str]:
    """Columns as they were given, a,b as two, unless a column is called so."""
    found: list[str] = []
    for text in given:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        found += [text] if text in names or not parts else parts
    return found


def _check_target(target: str, names: Sequence[str]) -> None:
    parts = [part.strip() for part in target.split(",")]
    if target not in names and len(parts) > 1 and all(part in names for part in parts):
        raise ValueError(
            f"Expected one column as --target, got {len(parts)} ({', '.join(parts)}); fit a model for each, with "
            "--drop for the other targets"
        )


def _widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"Expected --hidden as widths like 64,64, got {text!r}") from None


def _bounds(text: str) -> tuple[float | None, float | None]:
    try:
        lower, upper = (float(part) if part.strip() else None for part in text.split(","))
    except ValueError:
        raise ValueError(f"Expected --bounds as least,greatest, either may be left out (0,), got {text!r}") from None
    return lower, upper


def _class_weights(text: str) -> str | dict[str, float]:
    if "=" not in text:
        return text
    try:
        return {name.strip(): float(value) for name, value in (part.rsplit("=", 1) for part in text.split(","))}
    except ValueError:
        raise ValueError(f"Expected --class-weight as balanced, or as class=weight,…, got {text!r}") from None


def _numbers(summary: Summary) -> str:
    from dapcal.amounts import amount

    value = f"{summary.value:.4f}" if summary.measure == "accuracy" else amount(summary.value)
    radius = ", ".join(
        f"{name} {'none' if start is None else amount(start, 3)}" for name, start in summary.radius.items()
    )
    rows = [
        ("rows", f"{summary.train_rows:,} to learn from, {summary.held_out:,} held out, {summary.columns} columns"),
        ("task", summary.task),
        (summary.measure, value),
        ("NLL", f"{summary.nll:.4f} (without distances: {summary.base_nll:.4f})"),
        ("adjusted", summary.adjustment),
        ("phi", "none" if summary.adjustment == "none" else amount(summary.phi)),
        ("radius", radius),
    ]
    return "\n".join(f"{name:<10}{text}" for name, text in rows)
