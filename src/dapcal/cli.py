"""The command line: argument parsing and progress bars, nothing else."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
except ImportError as error:  # pragma: no cover
    raise SystemExit(f"The command line needs {error.name}; install it with: pip install 'dapcal[all]'") from error

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Distance-aware priors.")
console = Console(stderr=True)


@app.callback(invoke_without_command=True)
def version_option(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Distance-aware priors: make a trained neural network know how far it is from its data."""
    if version:
        from dapcal import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for figures and page.")] = Path("dapcal-demo"),
    seed: Annotated[int, typer.Option(help="Seed of data, networks and draws.")] = 0,
) -> None:
    """Run the two toy experiments of the paper and show them on one page.

    Example: dapcal demo --out my-folder
    """
    from dapcal.experiments import DEMO

    _run(list(DEMO), out, seed)


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help="two-moons, sinusoid or posteriors.")],
    out: Annotated[Path, typer.Option(help="Folder for numbers, figures and page.")] = Path("dapcal-results"),
    seed: Annotated[int, typer.Option(help="Seed of data, networks and draws.")] = 0,
) -> None:
    """Re-create one experiment of the paper next to ours, from data to figures.

    Example: dapcal reproduce two-moons
    """
    from dapcal.experiments import EXPERIMENTS

    if name not in EXPERIMENTS:
        console.print(f"There is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}.")
        raise typer.Exit(2)
    _run([name], out, seed)


def _run(names: list[str], out: Path, seed: int) -> None:
    from dapcal.experiments import EXPERIMENTS
    from dapcal.experiments.runner import run_and_write, write_page

    if out.exists() and not out.is_dir():
        console.print(f"Expected a folder for --out, but {out} is a file; name another.")
        raise typer.Exit(2)
    outcomes = {}
    columns = (TextColumn("{task.description:<36}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        for name in names:
            experiment = EXPERIMENTS[name]
            outcome = run_and_write(name, experiment, out, seed, _reporter(bars, experiment.title))
            outcomes[name] = (experiment, outcome)
    page = write_page(out, outcomes)
    typer.echo(page)


def _reporter(bars: Progress, title: str) -> Callable[[str, int, int], None]:
    tasks: dict[str, TaskID] = {}

    def report(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bars.add_task(f"{title}: {stage}", total=total)
        bars.update(tasks[stage], completed=done)

    return report


def main() -> None:
    """Entry point; an interrupted or terminated run cleans up and ends without a traceback."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        app()
    except KeyboardInterrupt:
        console.print("Interrupted; nothing half-written was left behind.")
        sys.exit(130)
