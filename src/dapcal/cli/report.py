"""`dapcal report`: one page for people about what a model knows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dapcal.cli.common import Device, Factory, Json, Key, Quiet, checked, output, typer, writable


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
        from dapcal.report import write

        writable(out, model, *([data] if data else []))
        loaded = load(model, factory, checked(device), key)
        said.progress("measuring", 0, None)
        new = None if data is None else loaded.inputs(data, MOST_NEW)
        if new is not None and len(new) == MOST_NEW:
            said.note(f"the report is about the first {MOST_NEW:,} rows of {data}")
        write(loaded.subject(model.name, new, "new data" if data is None else data.name), out)
        said.progress("measuring", 1, 1)
        said.result({"file": str(out)}, f"Saved to {out}; open it in a browser")


MOST_NEW = 20_000
