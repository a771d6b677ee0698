"""What every command shares: words or JSON, progress bars, notes, errors in one line, exit codes.

Exit codes: 0 done (a service: stopped), 1 failed on the way, 2 what was given is wrong, 130 interrupted, 143
terminated.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dapcal.visible import in_json, one_line, shown

if TYPE_CHECKING:
    from dapcal.calibrate import Calibrated

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
except ImportError as error:  # pragma: no cover
    raise SystemExit(f"The command line needs {error.name}; install it with: pip install 'dapcal[all]'") from error

FAILED, WRONG, INTERRUPTED, TERMINATED = 1, 2, 130, 143
MAX_SEED = 2**63 - 1  # that a torch.Generator takes
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Json = Annotated[bool, typer.Option("--json", help="Print the outcome as JSON on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors alone: no words, notes or bars.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or cuda:1 and so on.")]
Sign = Annotated[
    Path | None, typer.Option(readable=False, help="Private Ed25519 key (PEM) that signs the file; see the docs.")
]
Key = Annotated[
    Path | None, typer.Option(readable=False, help="Public Ed25519 key (PEM): refuse a model that it has not signed.")
]
EngineName = Annotated[str, typer.Option("--engine", help="local, or ray: the nodes of a Ray cluster.")]
Address = Annotated[
    str | None, typer.Option(help="Of a Ray cluster, HOST:PORT; by default the one that this machine is a node of.")
]
Factory = Annotated[
    str | None, typer.Option("--model", help="For your network: package.module:factory, as in `calibrate`.")
]

console = Console(stderr=True)


class Output:
    """Where a command's words go: the outcome to standard output, notes and bars to standard error."""

    def __init__(self, as_json: bool, quiet: bool, bars: Progress) -> None:
        self.as_json, self.quiet, self.bars = as_json, quiet, bars
        self.notes: list[str] = []
        self.tasks: dict[str, TaskID] = {}

    def note(self, text: str) -> None:
        """Something to know that is not an error; said once."""
        text = one_line(text)
        if text in self.notes:
            return
        self.notes.append(text)
        if not self.quiet:
            self.bars.console.print(f"note: {text}", style="yellow", highlight=False, markup=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """News of the work on the way."""
        if not self.quiet:
            self.bars.console.print(shown(text), highlight=False, markup=False)

    def progress(self, stage: str, done: int, total: int | None) -> None:
        """Move the bar of a stage; a total of None is not known."""
        if self.quiet:
            return
        if stage not in self.tasks:
            self.tasks[stage] = self.bars.add_task(shown(stage), total=total)
        self.bars.update(self.tasks[stage], completed=done, total=total)

    def result(self, data: dict[str, Any], words: str) -> None:
        """The outcome: as JSON (with the notes), in words, or not at all."""
        self.bars.stop()  # they would be drawn over it
        if self.as_json:
            told = json.dumps(_finite({**data, "notes": self.notes}), ensure_ascii=False, allow_nan=False)
            typer.echo(in_json(told))
        elif not self.quiet:
            typer.echo(shown(words))


def _finite(value: Any) -> Any:
    """The same with null in place of numbers that JSON does not have, such as the error of targets beyond 1e200."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def given(path: Path) -> Iterator[Path]:
    """A file as it was named, or what comes on standard input (-) or from a URL, as a file that is gone afterwards."""
    if _is_url(path):
        from dapcal.tables.urls import fetch

        with tempfile.TemporaryDirectory() as folder:
            yield fetch(url_text(path), Path(folder))
        return
    if str(path) != "-":
        yield path
        return
    from dapcal.files import complete_or_absent

    content = sys.stdin.buffer.read()
    if not content.strip():
        raise ValueError("Standard input (-) is empty; expected a table with a header")
    suffix = ".parquet" if content.startswith(b"PAR1") else ".csv.gz" if content.startswith(b"\x1f\x8b") else ".csv"
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / f"standard-input{suffix}"
        with complete_or_absent(copied) as part:
            part.write_bytes(content)
        yield copied


def url_text(path: Path) -> str:
    """A path, or the URL that it was meant as, as it was written."""
    if not _is_url(path):
        return str(path)
    from dapcal.tables.urls import url_of

    return url_of(path) or str(path)


@contextmanager
def destination(out: Path) -> Iterator[Path]:
    """A file to write, which is copied to its URL when the block ends without an error, if that is what `out` is."""
    if not _is_url(out):
        yield out
        return
    from dapcal.tables.urls import store

    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / out.name
        yield written
        store(written, url_text(out))


def resolved(out: Path) -> Path:
    """A path for a URL of this machine, file:///…; another URL as it is, if its store can be reached."""
    if not _is_url(out):
        return out
    from dapcal.tables.urls import on_this_machine

    return on_this_machine(url_text(out)) or out


def _is_url(path: Path) -> bool:
    """Without pyarrow, which networks do not need."""
    if ":/" not in path.as_posix():
        return False
    from dapcal.tables.urls import url_of

    return url_of(path) is not None


@contextmanager
def output(as_json: bool = False, quiet: bool = False) -> Iterator[Output]:
    """A command's body: warnings become notes, errors one line and an exit code."""
    columns = (TextColumn("{task.description:<28}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    bars = Progress(*columns, console=console, disable=quiet)
    out = Output(as_json, quiet, bars)
    with ExitStack() as stack:
        stack.enter_context(_errors(as_json))
        stack.enter_context(bars)
        stack.enter_context(_warnings_as(out.note))
        yield out


def end(message: str, code: int) -> typer.Exit:
    """Say why; brackets in it are not markup, and no path is broken over lines."""
    console.print(one_line(message), style="red", highlight=False, markup=False, soft_wrap=True)
    return typer.Exit(code)


def checked(device: str) -> str:
    """A device that is there."""
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"Expected --device as cpu or cuda, got {device!r}") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("There is no CUDA device here (or torch was built without it); use --device cpu")
    return device


def check_engine(engine: str, address: str | None) -> None:
    """Refuse an engine that is not there, or an address that it does not take."""
    from dapcal.engines.engine import NAMES

    if engine not in NAMES:
        raise ValueError(f"Expected --engine as {' or '.join(NAMES)}, got {engine!r}")
    if engine == "local" and address is not None:
        raise ValueError("--address is of a Ray cluster; leave it out, or choose --engine ray")


def too_few(said: Output, held_out: int, alpha: float) -> None:
    """A p-value is never below 1/(n + 1); tell where that means that nothing can be flagged."""
    if 0 < alpha < 1 / (held_out + 1):
        said.note(
            f"{held_out} held-out inputs give p-values of {1 / (held_out + 1):.3g} or more, so nothing can be flagged "
            f"at {alpha:g}; hold out more, or predict with a larger --alpha"
        )


def few_judges(said: Output, calibrated: Calibrated, level: float) -> None:
    """Tell where intervals cannot be as wide as held-out rows ask for, as these are too few."""
    from dapcal.recipes import few_judges as found

    if (told := found(calibrated, level)) is not None:
        said.note(told)


def all_written(read: int, written: int, source: Path) -> None:
    """A file with fewer rows than its source, or more, must never appear."""
    if read != written:
        raise RuntimeError(
            f"{read:,} rows of {source} were read and {written:,} written, a fault of dapcal; nothing was saved"
        )


def writable(out: Path, *inputs: Path) -> None:
    """Refuse a place that cannot be written to, or that is one of the inputs, before any work is done."""
    from dapcal.files import replaceable

    if _is_url(out):
        raise ValueError(f"Expected a file of this machine as --out, got the URL {url_text(out)}; copy it there then")
    replaceable(out)
    for given in inputs:
        if out.exists() and given.exists() and out.samefile(given):
            raise ValueError(f"--out would overwrite {given}, which is read; name another file")


def check_key(sign: Path | None) -> None:
    """Refuse a key that cannot sign, before any work is done."""
    if sign is not None:
        from dapcal.signing import signer

        signer(sign)


@contextmanager
def _errors(as_json: bool) -> Iterator[None]:
    def ending(message: str, code: int) -> typer.Exit:
        if as_json:
            typer.echo(in_json(json.dumps({"error": one_line(message), "exit_code": code}, ensure_ascii=False)))
        return end(message, code)

    try:
        yield
    except typer.Exit:  # a RuntimeError to Python
        raise
    except KeyboardInterrupt:
        raise ending("Interrupted; nothing was written.", INTERRUPTED) from None
    except (MemoryError, ImportError) as error:
        raise ending(str(error) or "Out of memory", FAILED) from error
    except BrokenPipeError:  # who reads the outcome has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer goes nowhere
        raise typer.Exit(FAILED) from None
    except OSError as error:
        no_room = error.errno in _NO_ROOM or os.strerror(errno.ENOSPC) in str(error)  # saving gives words alone
        raise ending(_of_os(error), FAILED if no_room else WRONG) from error
    except (ValueError, TypeError) as error:
        raise ending(str(error), WRONG) from error
    except RuntimeError as error:  # torch: no such device, out of memory
        raise ending(str(error), FAILED) from error


@contextmanager
def _warnings_as(note: Callable[[str], None]) -> Iterator[None]:
    """dapcal's own warnings as notes; others as they are."""
    from dapcal.types import DapcalWarning

    before = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always", DapcalWarning)

        def show(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
            if issubclass(category, DapcalWarning):
                note(str(message))
            else:
                before(message, category, *rest, **named)

        warnings.showwarning = show
        yield


def _of_os(error: OSError) -> str:
    """The system's words without its error number."""
    if error.errno is None or error.strerror is None:
        return str(error)
    where = "" if error.filename is None else f"{error.filename}: "
    advice = "; make room, or name another place" if error.errno in _NO_ROOM else ""
    return f"{where}{os.strerror(error.errno)}{advice}"
