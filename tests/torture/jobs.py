"""Work that writes files, in a process of its own or in a fork of this one, and the state that a kill may leave."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.csv
import pyarrow.parquet
import torch
from torch import nn

import dapcal
from dapcal.cli import main
from dapcal.likelihoods import Categorical
from dapcal.models import load
from dapcal.posteriors import variational
from dapcal.tables.writing import writer
from table_cases import write_rows

SMALL = ("--epochs", "2", "--hidden", "8", "--fast", "--quiet")
EPOCHS = 6
OWN, FORK = "a process of its own", "a fork"
START = "import sys; sys.path[:0] = sys.argv.pop(1).split(':'); from torture.jobs import work; work(sys.argv[1:])"


@dataclass(frozen=True)
class Job:
    """Something that writes.

    Attributes:
        name: what it is.
        words: for `work`; "{out}" is the folder that it writes to.
        outputs: names of the files that it writes there.
        goes_on: whether it is begun again after a kill, and must then end as if nothing had been.
    """

    name: str
    words: tuple[str, ...]
    outputs: tuple[str, ...]
    goes_on: bool = False

    def at(self, out: Path) -> list[str]:
        """Its words for a folder."""
        return [word.replace("{out}", str(out)) for word in self.words]


@dataclass(frozen=True)
class Known:
    """What a job writes when nobody disturbs it, and what was there before."""

    new: Mapping[str, bytes | None]
    old: Mapping[str, bytes]
    seconds: dict[str, float] = field(default_factory=dict)  # with a process of its own, and in a fork


def work(words: list[str]) -> None:
    """A command of dapcal, or one of the two calls in Python that write."""
    if words[0] == "train":
        train(Path(words[1]))
    elif words[0] == "save":
        load(words[1]).save(words[2])
    else:
        sys.argv = ["dapcal", *words]
        main()


def train(folder: Path) -> None:
    """A training run with checkpoints; its result is a file too."""
    torch.manual_seed(0)
    x = torch.randn(96, 2)
    y = (x[:, 0] > 0).long()
    network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    posterior = variational.fit(
        network, Categorical(), (x, y), epochs=EPOCHS, batch_size=16, checkpoint=folder / "run.pt", checkpoint_seconds=0
    )
    dapcal.files.write_text(folder / "result.txt", str(posterior.outputs(x[:4]).double().sum(1).tolist()))


def prepared(folder: Path) -> list[Job]:
    """Tables, a model, and the jobs on them."""
    write_rows(folder / "train.csv", 120)
    write_rows(folder / "new.csv", 4000, seed=1, target=False)
    table = pyarrow.csv.read_csv(folder / "new.csv")
    with writer(folder / "new.parquet") as append:
        append(table)
    with pyarrow.CompressedOutputStream(str(folder / "new.csv.gz"), "gzip") as file:
        file.write((folder / "new.csv").read_bytes())
    model = str(folder / "house.dap")
    begun = begin(["fit", str(folder / "train.csv"), "--target", "price", "-o", model, *SMALL])
    assert ended(begun) == 0
    predict = ("predict", model)
    return [
        Job("fit", ("fit", str(folder / "train.csv"), "--target", "price", "-o", "{out}/m.dap", *SMALL), ("m.dap",)),
        Job("predict, CSV", (*predict, str(folder / "new.csv"), "-o", "{out}/o.csv", "-q"), ("o.csv",)),
        Job("predict, Parquet", (*predict, str(folder / "new.parquet"), "-o", "{out}/o.parquet", "-q"), ("o.parquet",)),
        Job("predict, gz", (*predict, str(folder / "new.csv.gz"), "-o", "{out}/o.tsv", "-q"), ("o.tsv",)),
        Job("report", ("report", model, "-o", "{out}/r.html", "-q"), ("r.html",)),
        Job("save", ("save", model, "{out}/s.dap"), ("s.dap",)),
        Job("training", ("train", "{out}"), ("result.txt",), goes_on=True),
    ]


def reproduce() -> Job:
    """The longest of them."""
    return Job(
        "reproduce",
        ("reproduce", "sinusoid", "--out", "{out}", "-q"),
        ("sinusoid.json", "sinusoid-band.png"),
        goes_on=True,
    )


def content_of(path: Path) -> bytes | None:
    """What a file holds, None where there is none, without what differs from run to run.

    That is the order of an artefact's header, which safetensors shuffles, and how long an experiment took.
    """
    if not path.exists():
        return None
    content = path.read_bytes()
    if path.suffix == ".json":
        return re.sub(rb'"seconds": [0-9.]+', b'"seconds": 0', content)
    if path.suffix != ".dap" or len(content) < 8:
        return content
    end = 8 + int.from_bytes(content[:8], "little")
    try:
        return json.dumps(json.loads(content[8:end]), sort_keys=True).encode() + content[end:]
    except ValueError:
        return content


def begin(words: list[str], before: Callable[[], None] | None = None, errors: Path | None = None) -> int:
    """Work in a fork of this process, which has imported everything; gives its number.

    Args:
        words: for `work`.
        before: called in the fork first.
        errors: where its standard error goes; by default nowhere.
    """
    number = os.fork()
    if number:
        return number
    code = 70
    try:
        for stream in (1, 2):
            where = os.devnull if errors is None else errors
            os.dup2(os.open(where, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if before is not None:
            before()
        work(words)
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException as error:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"Traceback: {type(error).__name__}: {error}\n")
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


def ended(number: int, seconds: float | None = None) -> int:
    """The exit code of a fork, negative where it was killed; after so many seconds it is."""
    if seconds is not None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found, status = os.waitpid(number, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            time.sleep(min(0.001, max(deadline - time.monotonic(), 0)))
        os.kill(number, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def killed(words: list[str], seconds: float) -> int:
    """Work in a process of its own, killed after so many seconds, imports included; gives its exit code."""
    folders = ":".join(folder for folder in sys.path if folder)
    command = [sys.executable, "-c", START, folders, *words]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # as a fork, so that both round the same way
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=alone) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
