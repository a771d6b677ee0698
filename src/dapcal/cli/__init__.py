"""The command line: one file a command, argument parsing and words; the work is done elsewhere."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

from dapcal.cli.calibrate import calibrate
from dapcal.cli.common import INTERRUPTED, TERMINATED, typer
from dapcal.cli.doctor import doctor
from dapcal.cli.experiments import demo, reproduce
from dapcal.cli.explain import explain
from dapcal.cli.fit import fit
from dapcal.cli.once import Once
from dapcal.cli.predict import predict
from dapcal.cli.report import report
from dapcal.cli.score import score
from dapcal.cli.serve import serve

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Distance-aware priors: make a trained neural network know how far it is from its data.",
)
for command in (fit, predict, calibrate, score, report, explain, serve, demo, reproduce, doctor):
    app.command(cls=Once)(command)


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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        app()
    except KeyboardInterrupt:  # between two places that say what an interrupted run leaves
        _end_at_once(INTERRUPTED)
    except SystemExit as ended:
        if ended.code in (INTERRUPTED, TERMINATED):
            _end_at_once(ended.code)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # all is done: one that comes amid Python's own end is a traceback
        raise


def _end_at_once(code: int) -> None:
    """When all is cleaned up: threads still at work, or the same signal once more, would abort Python's own end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
