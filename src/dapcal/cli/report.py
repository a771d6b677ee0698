"""`dapcal report`: one page for people about what a model knows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dapcal.cli.common import Device, Factory, Json, Key, Output, Quiet, checked, output, typer, writable

if TYPE_CHECKING:
    from dapcal.models.judged_rows import Judged
    from dapcal.models.table import TableModel


def report(
    model: Annotated[Path, typer.Argument(readable=False, help="What `dapcal fit` or `dapcal calibrate` wrote.")],
    out: Annotated[Path, typer.Option("--out", "-o", readable=False, help="The page.")] = Path("report.html"),
    data: Annotated[
        Path | None, typer.Option(readable=False, help="New inputs to report on, e.g. last month's rows.")
    ] = None,
    factory: Factory = None,
    key: Key = None,
    device: Device = "cpu",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a report as one HTML file that needs nothing else: how good the model is, and what lies far from its data.

    Example: dapcal report house.dap --data new.csv -o report.html
    """
    with output(as_json, quiet) as said:
        from dapcal.models import load
        from dapcal.models.table import TableModel
        from dapcal.report import write

        writable(out, model, *([data] if data else []))
        loaded = load(model, factory, checked(device), key)
        said.progress("measuring", 0, None)
        new = None if data is None else loaded.inputs(data, MOST_NEW)
        if new is not None and len(new) == MOST_NEW:
            said.note(f"the report is about the first {MOST_NEW:,} rows of {data}")
        subject = loaded.subject(model.name, new, "new data" if data is None else data.name)
        if data is not None and isinstance(loaded, TableModel):
            subject = replace(subject, judged=_judged(loaded, data, said))
        write(subject, out)
        said.progress("measuring", 1, 1)
        said.result({"file": str(out)}, f"Saved to {out}; open it in a browser")


MOST_NEW = 20_000


def _judged(model: TableModel, data: Path, said: Output) -> Judged | None:
    """What the targets of new rows say of predictions, where the file has them; the first rows of it."""
    from dapcal.models.against_targets import Judge

    judge, rows = Judge(model, keep=True), 0
    for batch in model.read(data).batches:
        if batch.targets is None or rows == MOST_NEW:
            break
        x = batch.x[: MOST_NEW - rows]
        judge.add(model.columns(x), batch.targets[: len(x)], x)
        rows += len(x)
    if judge.problem is not None:
        said.note(judge.problem)
    return judge.judged()
