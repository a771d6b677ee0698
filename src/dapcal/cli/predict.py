"""`dapcal predict`: predictions for a table, arrays or images, in batches, whatever their number."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dapcal.cli.common import (
    Device,
    Factory,
    Json,
    Key,
    Output,
    Quiet,
    all_written,
    checked,
    given,
    output,
    too_few,
    typer,
    writable,
)
from dapcal.records import ALPHA, LEVEL

if TYPE_CHECKING:
    from dapcal.models import Model
    from dapcal.models.model import Reading

Alpha = Annotated[float, typer.Option(min=0, max=1, help="Rows with a p-value up to this are flagged.")]
Level = Annotated[float, typer.Option(help="Probability that an interval holds the target (regression).")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Of a network: inputs at a time; 256 by default.")]
Resize = Annotated[bool, typer.Option("--resize", help="Resize images of another size.")]
Mean = Annotated[str | None, typer.Option(help="Of pixels from 0 to 1 in training, e.g. 0.485,0.456,0.406.")]
ExcelSafe = Annotated[
    bool, typer.Option("--excel-safe", help="Texts that a spreadsheet would run as formulas get an apostrophe.")
]
Std = Annotated[str | None, typer.Option(help="Likewise, e.g. 0.229,0.224,0.225.")]


def predict(
    model: Annotated[Path, typer.Argument(readable=False, help="What `dapcal fit` or `dapcal calibrate` wrote.")],
    data: Annotated[
        Path,
        typer.Argument(
            readable=False,
            help="Table with the same columns: .csv, .tsv, .parquet, .xlsx or .npz, or - for standard input; of texts "
            "with their column; for your network an npz file with an array x (N, ...), or a folder of images.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", readable=False, help="Predictions: .csv, .tsv or .parquet; of a network .csv, .npz."
        ),
    ],
    factory: Factory = None,
    key: Key = None,
    alpha: Alpha = ALPHA,
    level: Level = LEVEL,
    keep: Annotated[list[str] | None, typer.Option(help="Column to copy, e.g. an id; may be repeated.")] = None,
    batch_size: BatchSize = None,
    resize: Resize = False,
    mean: Mean = None,
    std: Std = None,
    excel_safe: ExcelSafe = False,
    device: Device = "cpu",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict every row or input: prediction, uncertainty, and whether it is like the training data.

    Columns are matched by name. Images become numbers from 0 to 1 in the channels of the network, minus --mean, over
    --std. The data may be larger than memory; the output appears when it is complete.

    Example: dapcal predict house.dap new.csv -o out.csv
    """
    with output(as_json, quiet) as said, given(data) as data:
        from dapcal.models import load
        from dapcal.models.model import Reading

        _check(out, data, model, level, excel_safe)
        reading = Reading(tuple(keep or ()), batch_size, resize, numbers(mean, "mean"), numbers(std, "std"))
        loaded = load(model, factory, checked(device), key)
        predicted(loaded, data, reading, out, alpha, level, said, excel_safe)


def predicted(
    model: Model,
    data: Path,
    reading: Reading,
    out: Path,
    alpha: float,
    level: float,
    said: Output,
    excel_safe: bool = False,
) -> None:
    """Read, predict and write, batch by batch, and say how many inputs were flagged."""
    from dapcal.models.against_targets import Judge, words
    from dapcal.models.drift import Sample, drifts
    from dapcal.models.formulas import SUFFIXES, Formulas
    from dapcal.models.table import TableModel

    formulas, is_sheet = Formulas(excel_safe), out.suffix.lower() in SUFFIXES
    too_few(said, len(model.calibrated.evidence.held_out), alpha)
    source = model.read(data, reading)
    for note in source.notes():
        said.note(note)
    rows = flagged = written = 0
    reasons: Counter[str] = Counter()
    behind: Counter[str] = Counter()
    sample = Sample()
    judge = Judge(model) if isinstance(model, TableModel) else None
    with model.writer(out) as write:
        for batch in source.batches:
            columns = model.columns(batch.x, level=level, alpha=alpha)
            beside, told = batch.beside, columns
            if is_sheet:
                beside = formulas.names(formulas.values(beside))
                told = columns | formulas.values({"prediction": columns["prediction"]})
            written += write(beside, told)
            rows, flagged = rows + len(batch.x), flagged + int(columns["ood"].sum())
            reasons.update(filter(None, columns["reason"]))
            behind.update(f"`{name}` ({what})" for row in columns.get("unusual", ()) for name, what in row.items())
            sample.add(batch.x)
            if judge is not None:
                judge.add(columns, batch.targets)
            said.progress("predicting", rows, None if source.total is None else max(source.total, rows))
        all_written(source.total if source.is_exact and source.total is not None else rows, written, data)
    said.progress("predicting", rows, rows)
    for note in [*source.notes(), *filter(None, [formulas.note()])]:
        said.note(note)
    share = f"{flagged:,} of {rows:,} {source.noun} ({100 * flagged / rows:.1f} %) are flagged as out of distribution"
    why = "".join(f"\n  {count:,} {reason}" for reason, count in reasons.most_common())
    found: dict[str, Any] = {"file": str(out), source.noun: rows, "ood": flagged, "reasons": dict(reasons)}
    found["alpha"] = alpha
    if behind:
        found["unusual"] = dict(behind.most_common())
        why += "\nColumns behind flags: " + ", ".join(f"{name} {count:,}" for name, count in behind.most_common(_SHOWN))
    if judge is not None and isinstance(model, TableModel):
        if judge.problem is not None:
            said.note(judge.problem)
        if (quality := judge.found()) is not None:
            found["quality"] = asdict(quality)
            why += f"\n{words(quality, model.encoder.target, level)}"
        moved = drifts(model.encoder, model.train.x, sample())
        found["drift"] = [one._asdict() for one in moved]
        why += "".join(
            f"\nColumn `{one.column}` differs from training as a whole: {one.what}" for one in moved[:_SHOWN]
        )
    said.result(found, f"{share}{why}\nSaved to {out}")


_SHOWN = 8  # columns


def _check(out: Path, data: Path, model: Path, level: float, excel_safe: bool) -> None:
    """Refuse what cannot work before anything is loaded."""
    writable(out, data, model)
    if excel_safe and out.suffix.lower() not in (".csv", ".tsv"):
        raise ValueError(f"--excel-safe is for .csv and .tsv files, which spreadsheets open, got {out}; leave it out")
    if not 0 < level < 1:
        raise ValueError(f"Expected --level between 0 and 1, got {level}")


def numbers(text: str | None, option: str) -> tuple[float, ...] | None:
    """Numbers with commas between them."""
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"Expected --{option} as numbers like 0.5,0.5,0.5, got {text!r}") from None
