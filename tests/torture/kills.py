"""Kills at any moment from the start of a process on: a file is the old one or the new one, never half or mixed."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from pathlib import Path

import torch

from torture import writers
from torture.jobs import FORK, OWN, Job, Known, begin, content_of, ended, killed, prepared, reproduce
from torture.tally import Tally

LONG = 50  # kills of all to one of the longest job


def run(count: int, seed: int) -> Tally:
    """Kill so many processes and as many forks, and let as many writers meet; gives what was tried and what failed."""
    tally, draws = Tally("kills"), random.Random(seed)
    torch.set_num_threads(1)  # forks have no other threads
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = prepared(folder)
        jobs = jobs if count >= len(jobs) else draws.sample(jobs, count)
        long = [reproduce()] * (count >= LONG)
        known = {job: learnt(job, folder / "known") for job in (*jobs, *long)}
        for number in range(count):
            job = long[0] if long and number % LONG == 0 else draws.choice(jobs)
            for way in (OWN, FORK) if job not in long else (OWN,):
                kill(job, known[job], way, folder / "out", draws, tally)
        writers.run(jobs, known, count, draws, folder / "writers", tally)
    return tally


def learnt(job: Job, folder: Path) -> Known:
    """What the job writes, twice the same, and how long it takes."""
    found = []
    seconds = {}
    for way in (OWN, FORK):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        started = time.monotonic()
        code = killed(job.at(folder), 3600) if way == OWN else ended(begin(job.at(folder)))
        assert code == 0, f"{job.name} failed with exit code {code}"
        seconds[way] = time.monotonic() - started
        found.append({name: content_of(folder / name) for name in job.outputs})
    assert found[0] == found[1], f"{job.name} does not write the same twice"
    shutil.rmtree(folder)
    return Known(found[0], dict.fromkeys(job.outputs, b"what was there before"), seconds)


def kill(job: Job, known: Known, way: str, folder: Path, draws: random.Random, tally: Tally) -> None:
    """One kill, and what it leaves; work that goes on is begun again until it ends."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    was_there = draws.random() < 0.5
    if was_there:
        for name, content in known.old.items():
            (folder / name).write_bytes(content)
    moment = draws.uniform(0, 1.05 * known.seconds[way])
    words = job.at(folder)
    code = killed(words, moment) if way == OWN else ended(begin(words), moment)
    where = f"{job.name} in {way}, killed after {moment:.3f} s"
    tally.check(code in (0, -9), f"{where}: exit code {code}")
    for name in job.outputs:
        tally.check(*state(folder / name, known, name, was_there, code == 0, where))
    if job.goes_on and code != 0:
        again = ended(begin(words))
        right = again == 0 and all(content_of(folder / name) == known.new[name] for name in job.outputs)
        tally.check(right, f"{where}: begun again it ended otherwise (exit code {again})")


def state(path: Path, known: Known, name: str, was_there: bool, is_done: bool, where: str) -> tuple[bool, str]:
    """Whether a file is the old one or the new one, or absent where there was none; and words for where it is not."""
    content = content_of(path)
    if content == known.new[name]:
        return True, ""
    allowed = not is_done and content == (known.old[name] if was_there else None)
    shown = "absent" if content is None else f"{len(content)} bytes that are neither old nor new"
    return allowed, f"{where}: {name} is {shown}"
