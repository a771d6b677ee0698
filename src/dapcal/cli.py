"""The command line: argument parsing and progress bars, nothing else."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

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
    name: Annotated[str, typer.Argument(help="two-moons, sinusoid, posteriors, uci-gap, mnist or fashion-mnist.")],
    out: Annotated[Path, typer.Option(help="Folder for numbers, figures and page.")] = Path("dapcal-results"),
    seed: Annotated[int, typer.Option(help="Seed of data, networks and draws; the first of several.")] = 0,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds (mnist, fashion-mnist).")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (mnist, fashion-mnist).")] = None,
    parts: Annotated[str | None, typer.Option(help="Parts of the tables, e.g. paper,ours (as above).")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes at a time; by default one for each core.")] = None,
    full: Annotated[bool | None, typer.Option("--full", help="All that is left out to save time.")] = None,
) -> None:
    """Re-create one experiment of the paper next to ours, from data to figures.

    Long ones go on where they were interrupted. Real data are found through the variable DAPCAL_DATA.

    Example: dapcal reproduce two-moons
    """
    from dapcal.experiments import EXPERIMENTS

    if name not in EXPERIMENTS:
        raise _end(f"There is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}.", 2)
    given: dict[str, Any] = {"seeds": seeds, "device": device, "parts": parts, "jobs": jobs, "full": full}
    known = EXPERIMENTS[name].options
    for option, value in given.items():
        if value is not None and option not in known:
            heeded = ", ".join(f"--{o}" for o in ("seed", *known))
            raise _end(f"{name} has no option --{option}; it has {heeded}.", 2)
    if parts is not None:
        given["parts"] = tuple(part.strip() for part in parts.split(","))
    if "jobs" in known and jobs is None:
        given["jobs"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    _run([name], out, seed, {option: value for option, value in given.items() if value is not None})


def _run(names: list[str], out: Path, seed: int, options: dict[str, Any] | None = None) -> None:
    if out.exists() and not out.is_dir():
        raise _end(f"Expected a folder for --out, but {out} is a file; name another.", 2)
    try:
        typer.echo(_write(names, out, seed, options or {}))
    except KeyboardInterrupt:
        raise _end("Interrupted; the same command goes on from what is finished.", 130) from None
    except (ImportError, ValueError, OSError) as error:  # these say what to do
        raise _end(str(error), 1) from error


def _write(names: list[str], out: Path, seed: int, options: dict[str, Any]) -> Path:
    from dapcal.experiments import EXPERIMENTS
    from dapcal.experiments.records import Run
    from dapcal.experiments.runner import run_and_write, write_page

    outcomes = {}
    columns = (TextColumn("{task.description:<36}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        for name in names:
            experiment = EXPERIMENTS[name]
            run = Run(
                work=out / "unfinished",
                seed=seed,
                progress=_reporter(bars, experiment.title),
                say=bars.console.print,
                **options,
            )
            outcome = run_and_write(name, experiment, out, run)
            outcomes[name] = (experiment, outcome)
    return write_page(out, outcomes)


def _end(message: str, code: int) -> typer.Exit:
    """Say why; brackets in it are no markup, and no path is broken over lines."""
    console.print(message, style="red", highlight=False, markup=False, soft_wrap=True)
    return typer.Exit(code)


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
    app()
