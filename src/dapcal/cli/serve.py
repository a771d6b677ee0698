"""`dapcal serve`: a model as an HTTP service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dapcal.cli.common import INTERRUPTED, Device, Factory, Json, Key, Quiet, checked, output, too_few, typer
from dapcal.records import ALPHA, LEVEL


def serve(
    model: Annotated[Path, typer.Argument(readable=False, help="What `dapcal fit` or `dapcal calibrate` wrote.")],
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    alpha: Annotated[float, typer.Option(min=0, max=1, help="Rows with a p-value up to this are flagged.")] = ALPHA,
    level: Annotated[float, typer.Option(help="Probability that an interval holds the target (regression).")] = LEVEL,
    most_rows: Annotated[int, typer.Option(min=1, help="Rows of one batch, at most.")] = 1000,
    factory: Factory = None,
    key: Key = None,
    device: Device = "cpu",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Answer requests over HTTP: POST /predict, POST /predict/batch, GET /health, GET /metrics, GET /openapi.json.

    Ends with Ctrl-C or a SIGTERM, after the requests that it has taken.

    Example: dapcal serve house.dap --port 8000
    """
    with output(as_json, quiet) as said:
        import torch

        from dapcal.models import load
        from dapcal.serve import Limits, Served, run

        if not 0 < level < 1:
            raise ValueError(f"Expected --level between 0 and 1, got {level}")
        torch.set_num_threads(1)  # rows come in small batches, and the other cores belong to the network's side
        loaded = load(model, factory, checked(device), key)
        too_few(said, len(loaded.calibrated.evidence.held_out), alpha)
        whole = Served.of(loaded, model.name, alpha=alpha, level=level)

        def started(address: str) -> None:
            said.result({"address": address}, f"Serving {model.name} at {address}; Ctrl-C ends it")

        try:
            run(whole, host, port, Limits(rows=most_rows), started)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
