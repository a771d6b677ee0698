"""`dapcal demo` and `dapcal reproduce`: the paper's experiments next to ours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from dapcal.cli.common import FAILED, WRONG, Address, EngineName, Json, Output, Quiet, check_engine, end, output, typer
from dapcal.progress import Stages


def demo(
    out: Annotated[Path, typer.Option(help="Folder for figures and page.")] = Path("dapcal-demo"),
    seed: Annotated[int, typer.Option(help="Seed of data, networks and draws.")] = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run the two toy experiments of the paper and show them on one page.

    Example: dapcal demo --out my-folder
    """
    from dapcal.experiments import DEMO

    _run(list(DEMO), out, seed, {}, as_json, quiet)


def reproduce(
    name: Annotated[
        str, typer.Argument(help="two-moons, sinusoid, posteriors, uci-gap, no-harm, mnist, fashion-mnist or cifar10.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for numbers, figures and page.")] = Path("dapcal-results"),
    seed: Annotated[int, typer.Option(help="Seed of data, networks and draws; the first of several.")] = 0,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds (not of posteriors, no-harm).")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (of images).")] = None,
    parts: Annotated[str | None, typer.Option(help="Parts of the tables, e.g. paper,ours (as above).")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes at a time; by default one for each core.")] = None,
    full: Annotated[bool | None, typer.Option("--full", help="All that is left out to save time.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Begin nothing after so many; the same command goes on (cifar10).")
    ] = None,
    engine: EngineName = "local",
    address: Address = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Re-create one experiment of the paper next to ours, from data to figures.

    Long ones go on where they were interrupted. Real data are found through the variable DAPCAL_DATA. With --engine ray
    their parts run on the nodes of a Ray cluster, which all see the folder --out and the data.

    Example: dapcal reproduce two-moons
    """
    from dapcal.experiments import EXPERIMENTS

    if name not in EXPERIMENTS:
        raise end(f"There is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}.", WRONG)
    given: dict[str, Any] = {
        "seeds": seeds, "device": device, "parts": parts, "jobs": jobs, "full": full, "minutes": minutes,
    }  # fmt: skip
    known = EXPERIMENTS[name].options
    for option, value in given.items():
        if value is not None and option not in known:
            known_options = ", ".join(f"--{o}" for o in ("seed", *known))
            raise end(f"{name} has no option --{option}; it has {known_options}.", WRONG)
    if parts is not None:
        given["parts"] = tuple(part.strip() for part in parts.split(","))
    if "jobs" in known and jobs is None:
        given["jobs"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    options = {option: value for option, value in given.items() if value is not None}
    if engine != "local" and ("jobs" not in known or jobs is not None):
        what = (
            "has no parts to share among nodes" if "jobs" not in known else "has a worker for every CPU of the cluster"
        )
        raise end(
            f"With --engine {engine} {name} {what}; leave out {'--engine' if 'jobs' not in known else '--jobs'}.", WRONG
        )
    _run([name], out, seed, options, as_json, quiet, engine, address)


def _run(
    names: list[str],
    out: Path,
    seed: int,
    options: dict[str, Any],
    as_json: bool,
    quiet: bool,
    engine: str = "local",
    address: str | None = None,
) -> None:
    if out.exists() and not out.is_dir():
        raise end(f"Expected a folder for --out, but {out} is a file; name another.", WRONG)
    with output(as_json, quiet) as said:
        check_engine(engine, address)
        if engine == "ray":
            from dapcal.engines.ray import connected

            cluster = connected(address)
            options |= {"jobs": max(cluster.workers, 2), "elsewhere": cluster.submit}  # of one job nothing leaves here
            out = out.resolve()
        try:
            page, unfinished = _write(names, out, seed, options, said)
        except KeyboardInterrupt:
            raise end("Interrupted; the same command goes on from what is finished.", 130) from None
        except (ImportError, ValueError, OSError) as error:  # these say what to do
            raise end(str(error), FAILED) from error
        said.result({"page": str(page)} | ({"unfinished": unfinished} if unfinished else {}), str(page))


def _write(names: list[str], out: Path, seed: int, options: dict[str, Any], said: Output) -> tuple[Path, int]:
    """The page, and how many rows are still to come."""
    from dapcal.experiments import EXPERIMENTS
    from dapcal.experiments.records import Run
    from dapcal.experiments.runner import run_and_write, write_page

    outcomes = {}
    for name in names:
        experiment = EXPERIMENTS[name]
        run = Run(
            work=out / "unfinished", seed=seed, progress=_reporter(said, experiment.title), say=said.say, **options
        )
        outcome = run_and_write(name, experiment, out, run)
        outcomes[name] = (experiment, outcome)
    return write_page(out, outcomes), sum(outcome.unfinished for _, outcome in outcomes.values())


def _reporter(said: Output, title: str) -> Stages:
    return lambda stage, done, total: said.progress(f"{title}: {stage}", done, total)
