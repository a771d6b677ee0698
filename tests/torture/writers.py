"""Writers that meet, or that a disk, a quota, a folder or a link stands against: files stay whole, words say why."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import resource
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

from torture.jobs import FORK, Job, Known, begin, content_of, ended
from torture.tally import Tally

ENDED_WELL = (1, 2)  # exit codes of a command that says why it cannot
NOT_HERE = 77  # that of a fork which is told to be what it cannot be


def run(
    jobs: list[Job], known: Mapping[Job, Known], count: int, draws: random.Random, folder: Path, tally: Tally
) -> None:
    """Several writers of one file, and everything that can stand against one."""
    commands = [job for job in jobs if job.words[0] in ("fit", "predict", "report")]
    for number in range(max(count // 8, len(commands)) if commands else 0):
        job = commands[number % len(commands)]
        meet(job, known[job], draws.choice([2, 4]), draws, fresh(folder), tally)
        size = draws.randrange(len(next(iter(known[job].new.values()))))
        against(job, known[job], quota(size), f"a quota of {size} bytes", fresh(folder), tally)
        against(job, known[job], *no_room(draws), fresh(folder), tally, must_stop=True)
    for job in commands:
        against(job, known[job], full, "a full disk at write", fresh(folder), tally, must_stop=True)
        read_only(job, known[job], fresh(folder), tally)
        link(job, known[job], fresh(folder), tally)
        for make, what in ((os.mkfifo, "a FIFO"), (os.mkdir, "a folder"), (dangling, "a link to nothing")):
            refused(job, make, what, fresh(folder), tally)
        refused(job, lambda path: path.symlink_to("/dev/full"), "/dev/full", fresh(folder), tally)


def fresh(folder: Path) -> Path:
    """The folder, empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    return folder


def meet(job: Job, known: Known, count: int, draws: random.Random, folder: Path, tally: Tally) -> None:
    """Several at once, all of whom believe to have the same process number; some are killed."""

    def same_number() -> None:
        os.getpid = lambda: 4711  # type: ignore[assignment]

    numbers = [begin(job.at(folder), same_number) for _ in range(count)]
    doomed = {number: draws.uniform(0, known.seconds[FORK]) for number in numbers if draws.random() < 0.3}
    codes = [ended(number, doomed.get(number)) for number in numbers]
    (name,) = job.outputs
    content = content_of(folder / name)
    allowed = (known.new[name],) if 0 in codes else (known.new[name], None)
    tally.check(content in allowed, f"{count} writers of {job.name}: {name} is mixed or lost ({codes})")
    tally.check(set(codes) <= {0, -9}, f"{count} writers of {job.name}: exit codes {codes}")


def against(
    job: Job, known: Known, before: Callable[[], None], what: str, folder: Path, tally: Tally, must_stop: bool = False
) -> None:
    """A command that may be stopped: then the old file is as it was, one line says why, and nothing else is left."""
    (name,) = job.outputs
    (folder / name).write_bytes(known.old[name])
    errors = folder.parent / "errors"
    errors.unlink(missing_ok=True)
    errors.touch(0o666)
    code = ended(begin(job.at(folder), before, errors))
    said = errors.read_text()
    content = content_of(folder / name)
    if code == 0 and not must_stop:
        tally.check(content == known.new[name], f"{job.name} with {what}: exit code 0, and {name} is not the new file")
        return
    tally.check(code in ENDED_WELL, f"{job.name} with {what}: exit code {code}, {said[-300:]}")
    is_one_line = "Traceback" not in said and len(said.splitlines()) == 1
    tally.check(is_one_line, f"{job.name} with {what}: said {said[-300:]!r}")
    tally.check(content == known.old[name], f"{job.name} with {what}: the old {name} is not as it was")
    left = sorted(path.name for path in folder.iterdir())
    tally.check(left == [name], f"{job.name} with {what}: left {left}")


def quota(size: int) -> Callable[[], None]:
    """No file may be larger."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def no_room(draws: random.Random) -> tuple[Callable[[], None], str]:
    """One of the system's calls on the way says that the disk is full."""
    name = draws.choice(["fsync", "replace", "chmod"])

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return lambda: setattr(os, name, fail), f"a full disk at {name}"


def full() -> None:
    """Whatever is written to a part file meets a full disk, also where a library in C++ opens it by its name."""
    create = os.open

    def instead(path: str | Path, flags: int, mode: int = 0o777, **more: int) -> int:
        if flags & os.O_EXCL and os.fspath(path).endswith(".part"):
            Path(path).symlink_to("/dev/full")
            return create(path, os.O_RDWR)
        return create(path, flags, mode, **more)

    os.open = instead  # type: ignore[assignment]


def read_only(job: Job, known: Known, folder: Path, tally: Tally) -> None:
    """A folder that may not be written to; root, whom no folder refuses, gives up that right first (Linux)."""

    def obey() -> None:
        if os.getuid() == 0:
            header = struct.pack("Ii", 0x20080522, 0)  # version 3 of the interface, this process
            capset = getattr(ctypes.CDLL(None), "capset", None)
            if capset is None or capset(header, bytes(24)) != 0:
                raise SystemExit(NOT_HERE)

    (name,) = job.outputs
    (folder / name).write_bytes(known.old[name])
    folder.chmod(0o555)
    errors = folder.parent / "errors"
    errors.unlink(missing_ok=True)
    code = ended(begin(job.at(folder), obey, errors))
    folder.chmod(0o777)
    if code == NOT_HERE:
        tally.skip("a folder that root may not write to: capset does not take that right away", 2)
        return
    said = errors.read_text()
    tally.check(code == 2 and "Traceback" not in said, f"{job.name}, read-only: exit code {code}, {said[-300:]}")
    tally.check(content_of(folder / name) == known.old[name], f"{job.name}, read-only: the old file has changed")


def link(job: Job, known: Known, folder: Path, tally: Tally) -> None:
    """A link stays, and what it leads to is replaced whole."""
    (name,) = job.outputs
    (folder / "elsewhere").mkdir()
    target = folder / "elsewhere" / name
    target.write_bytes(known.old[name])
    (folder / name).symlink_to(target)
    code = ended(begin(job.at(folder)))
    right = code == 0 and (folder / name).is_symlink() and content_of(target) == known.new[name]
    tally.check(right, f"{job.name} through a link: exit code {code}")


def dangling(path: Path) -> None:
    """A link to nothing."""
    path.symlink_to(path.with_name("nowhere"))


def refused(job: Job, make: Callable[[Path], object], what: str, folder: Path, tally: Tally) -> None:
    """What is not a file is left alone, at once and with a sentence."""
    (name,) = job.outputs
    make(folder / name)
    before = (folder / name).lstat()
    errors = folder.parent / "errors"
    errors.unlink(missing_ok=True)
    code = ended(begin(job.at(folder), None, errors), 60)
    said = errors.read_text()
    tally.check(code == 2 and "Traceback" not in said, f"{job.name} to {what}: exit code {code}, {said[-300:]}")
    after = (folder / name).lstat()
    tally.check((before.st_ino, before.st_mode) == (after.st_ino, after.st_mode), f"{job.name}: replaced {what}")
