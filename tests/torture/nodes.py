"""Nodes, workers and drivers of a Ray cluster killed at any moment: the output is that of one machine, every byte."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pyarrow.csv
import pyarrow.parquet

from ray_cases import SETTINGS, Nodes, cluster
from table_cases import run as command
from table_cases import write_houses, write_rows
from torture.tally import Tally

ROWS = 120_000
VICTIMS = ("a node", "a worker", "the driver")
MOST = 900  # seconds of one round
CHECKS = 3  # of one round


def run(count: int, seed: int) -> Tally:
    """So many rounds; gives what was tried and what failed."""
    tally, draws = Tally("nodes"), random.Random(seed)
    if find_spec("ray") is None:
        tally.skip("the extra `ray` is not installed", CHECKS * count)
        return tally
    with tempfile.TemporaryDirectory() as name, cluster() as nodes:
        folder = write_houses(Path(name))
        write_rows(folder / "rows.csv", ROWS, seed=3)
        pyarrow.parquet.write_table(
            pyarrow.csv.read_csv(folder / "rows.csv"), folder / "rows.parquet", row_group_size=50_000
        )
        for suffix in ("csv", "parquet"):
            done = command("predict", folder / "house.dap", folder / f"rows.{suffix}", "-o", folder / f"one.{suffix}")
            assert done.exit_code == 0, done.output
        started = time.monotonic()
        assert driver(folder, "out.csv", nodes).wait() == 0
        seconds = time.monotonic() - started
        for _ in range(count):
            suffix, victim = draws.choice(("csv", "parquet")), draws.choice(VICTIMS)
            one_round(folder, f"out.{suffix}", nodes, victim, draws.uniform(0, seconds), draws, tally)
    return tally


def one_round(
    folder: Path, name: str, nodes: Nodes, victim: str, moment: float, draws: random.Random, tally: Tally
) -> None:
    """One kill, and a driver that ends, the same or another one."""
    out = folder / name
    out.unlink(missing_ok=True)
    process = driver(folder, name, nodes)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(moment)
    where = f"{victim} killed after {moment:.2f} s, {name}"
    if victim == "a node":
        nodes.kill()
    elif victim == "a worker":
        while not (found := workers()) and process.poll() is None:  # a kill too early would meet none
            time.sleep(0.05)
        if found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(draws.choice(found), signal.SIGKILL)
    else:
        process.kill()
        process.wait()
        process = driver(folder, name, nodes)
    code = process.wait(MOST)
    tally.check(code == 0, f"{where}: exit code {code}")
    same = out.exists() and out.read_bytes() == (folder / name.replace("out", "one")).read_bytes()
    tally.check(same, f"{where}: the output is not that of one machine")
    tally.check(not out.with_name(f"{name}.parts").exists(), f"{where}: unfinished blocks are left")
    if victim == "a node":
        nodes.others.append(nodes.add())


def driver(folder: Path, name: str, nodes: Nodes) -> subprocess.Popen[bytes]:
    """A run of the command in a process of its own."""
    words = ["predict", folder / "house.dap", folder / name.replace("out", "rows"), "-o", folder / name, "-q"]
    call = [sys.executable, "-m", "dapcal", *map(str, words), "--engine", "ray", "--address", nodes.address]
    return subprocess.Popen(call, env={**os.environ, **SETTINGS}, stderr=subprocess.DEVNULL)


def workers() -> list[int]:
    """Processes that predict, of any node of this process's cluster; another one on this machine is left alone."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # ended meanwhile
            number = int(path.parent.name)
            if path.read_bytes().startswith(b"ray::_Worker") and os.getpid() in ancestors(number):
                found.append(number)
    return found


def ancestors(number: int) -> list[int]:
    """Of a process, the nearest first."""
    found: list[int] = []
    while number > 1:
        number = int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(number)
    return found
