"""The command line: one file a command, argument parsing and words; the work is done elsewhere."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

from dapcal.cli.common import typer
from dapcal.cli.experiments import demo, reproduce

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Distance-aware priors: make a trained neural network know how far it is from its data.",
)
app.command()(demo)
app.command()(reproduce)


@app.callback(invoke_without_command=True)
def version_option(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Distance-aware priors: make a trained neural network know how far it is from its data."""
    if version:
        from dapcal import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point; an interrupted or terminated run cleans up and ends without a traceback."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    app()
