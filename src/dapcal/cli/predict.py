"""`dapcal predict`: predictions for a table, arrays or images, in batches, whatever their number."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dapcal.cli.common import (
    Address,
    Device,
    EngineName,
    Factory,
    Json,
    Key,
    Output,
    Quiet,
    all_written,
    check_engine,
    checked,
    destination,
    few_judges,
    given,
    output,
    resolved,
    too_few,
    typer,
    url_text,
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
        list[Path],
        typer.Argument(
            readable=False,
            help="Table with the same columns: .csv, .tsv, .parquet, .xlsx or .npz, or - for standard input, or "
            "several files, URLs (s3://, gs://, …) or folders of them; of texts with their column; for your network an "
            "npz file with an array x (N, ...), or a folder of images.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            readable=False,
            help="Predictions: .csv, .tsv or .parquet, or a URL of one (s3://, gs://, …); of a network .csv, .npz.",
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
    engine: EngineName = "local",
    address: Address = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict every row or input: prediction, uncertainty, and whether it is like the training data.

    Columns are matched by name. Images become numbers from 0 to 1 in the channels of the network, minus --mean, over
    --std. The data may be larger than memory; the output appears when it is complete. With --engine ray the rows of a
    table are predicted on all nodes of a Ray cluster, and a run that was ended goes on with the same command.

    Example: dapcal predict house.dap new.csv -o out.csv
    """
    with output(as_json, quiet) as said, ExitStack() as stack:
        from dapcal.models import load
        from dapcal.models.model import Reading
        from dapcal.models.table import TableModel

        out = resolved(out)
        if engine != "local" and url_text(out) != str(out):
            raise ValueError(f"--engine ray keeps its blocks beside --out, and {url_text(out)} is a URL; name a file")
        first, *others = (stack.enter_context(given(path)) for path in data)
        also = tuple(others)
        _check(out, (first, *also), model, level, excel_safe)
        reading = Reading(tuple(keep or ()), batch_size, resize, numbers(mean, "mean"), numbers(std, "std"), also)
        check_engine(engine, address)
        if engine == "ray" and device != "cpu":
            raise ValueError("--engine ray predicts on the CPUs of its nodes; leave --device out")
        loaded = load(model, factory, checked(device), key)
        if also and not isinstance(loaded, TableModel):
            raise ValueError(f"Several files are for models of tables, and {model} is of another kind; name one")
        few_judges(said, loaded.calibrated, level)
        if engine == "local":
            predicted(loaded, first, reading, out, alpha, level, said, excel_safe)
        else:
            from dapcal.cli.predict_blocks import predicted_in_blocks

            brought = {path: str(name) for path, name in zip((first, *also), data, strict=True) if path != name}
            predicted_in_blocks(
                loaded, model, first, reading, out, alpha, level, said, excel_safe, engine, address, brought
            )


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
    from dapcal.models.answering import answered
    from dapcal.models.formulas import SUFFIXES, Formulas
    from dapcal.models.tally import Tally, counted

    formulas, is_sheet = Formulas(excel_safe), out.suffix.lower() in SUFFIXES
    too_few(said, len(model.calibrated.evidence.held_out), alpha)
    source = model.read(data, reading)
    for note in source.notes():
        said.note(note)
    rows, written, tally = 0, 0, Tally(model)
    with destination(out) as local, model.writer(local, formulas if is_sheet else None) as write:
        for batch, columns in answered(model, source, level=level, alpha=alpha):
            rows, written = rows + len(batch.x), written + write(batch.beside, columns)
            tally.add(counted(columns), columns, batch.targets)
            tally.add_inputs(batch.x)
            said.progress("predicting", tally.rows, None if source.total is None else max(source.total, tally.rows))
        all_written(source.total if source.is_exact and source.total is not None else rows, written, data)
    said.progress("predicting", tally.rows, tally.rows)
    for note in filter(None, [*source.notes(), formulas.note(), tally.problem()]):
        said.note(note)
    said.result(*tally.told(url_text(out), source.noun, alpha, level))


def _check(out: Path, data: Sequence[Path], model: Path, level: float, excel_safe: bool) -> None:
    """Refuse what cannot work before anything is loaded."""
    if url_text(out) == str(out):
        writable(out, *data, model)
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
