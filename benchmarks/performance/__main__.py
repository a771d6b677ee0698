"""Ask all questions and write results/performance.json; a run that was interrupted goes on with the next question.

Run: PYTHONPATH=benchmarks python -m performance [--small] [--only laplace,neighbors] [--repeats 5]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dapcal.experiments.records import environment, short, with_leaves
from dapcal.experiments.runner import as_json
from dapcal.files import write_text

QUESTIONS = (
    "laplace",
    "nearest",
    "approximate",
    "detectors",
    "intervals",
    "ensembles",
    "service",
    "predictions",
    "members",
    "files",
    "streams",
    "scaling",
)
PEERS = ("laplace-torch", "faiss-cpu", "scikit-learn", "pytorch-ood", "mapie", "fastapi")


def main() -> None:
    options = _options()
    settings = {
        "commit": commit(),
        "repeats": options.repeats,
        "small": options.small,
        "on": f"{_processor()}, torch {torch.__version__}",
    }
    options.answers.mkdir(parents=True, exist_ok=True)
    asked, failed = options.only or QUESTIONS, []
    for number, name in enumerate(asked, 1):
        if not options.only and (known := answer(options.answers, name)) is not None and known["settings"] == settings:
            continue
        print(f"{number}/{len(asked)} {name}", flush=True)
        found = ask(name, options.repeats, options.small)
        if found is None:
            failed.append(name)
        else:
            write_text(options.answers / f"{name}.json", json.dumps(found | {"settings": settings}))
    answers = {name: known for name in QUESTIONS if (known := answer(options.answers, name)) is not None}
    missing = [name for name in QUESTIONS if name not in answers]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found = {"experiment": "performance", **told(options.small), "questions": answers, "missing": missing}
    write_text(options.out, as_json(with_leaves(found, short)))
    if failed or missing:
        sys.exit(f"without an answer: {', '.join(dict.fromkeys([*failed, *missing]))}; run it again for these")


def answer(folder: Path, name: str) -> dict[str, Any] | None:
    """What a question was answered with the last time; None where it was not."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def ask(name: str, repeats: int, small: bool) -> dict[str, Any] | None:
    """The rows of one question, measured in a process of their own; None where it ends in an error."""
    started, load = time.perf_counter(), os.getloadavg()[0]
    command = [sys.executable, "-m", "performance.ask", name, str(repeats), *(["small"] if small else [])]
    # libraries with threads of their own spin against each other while they wait
    done = subprocess.run(command, env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}, stdout=subprocess.PIPE)
    if done.returncode:
        return None
    took = time.perf_counter() - started
    print(f"  {took:.0f} s", flush=True)
    return json.loads(done.stdout.splitlines()[-1]) | {"seconds": took, "load": [load, os.getloadavg()[0]]}


def told(small: bool) -> dict[str, Any]:
    """What the numbers depend on."""
    own = environment() | {"processor": _processor(), "cores": os.cpu_count()}
    return {"environment": own, "peers": {name: version(name) for name in PEERS}, "small": small}


def commit() -> str:
    """The last one that changed what is measured, or how."""
    places = ("src", "benchmarks")
    last = _git("log", "-1", "--format=%h", "--abbrev=12", "--", *places)
    return last + (" and changes" if _git("status", "--porcelain", "--", *places) else "")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout.strip()


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes and two runs, to try it")
    parser.add_argument("--only", type=lambda names: names.split(","), help="ask these anew, e.g. laplace,nearest")
    parser.add_argument("--repeats", type=int, help="runs of everything, in turns; by default 5, of small ones 2")
    options = parser.parse_args()
    if unknown := set(options.only or ()) - set(QUESTIONS):
        parser.error(f"Expected questions among {', '.join(QUESTIONS)}, got {', '.join(sorted(unknown))}")
    options.repeats = options.repeats or (2 if options.small else 5)
    name = "performance-small" if options.small else "performance"
    options.answers = Path("build") / name
    options.out = Path("build" if options.small else "results") / f"{name}.json"
    return options


if __name__ == "__main__":
    main()
