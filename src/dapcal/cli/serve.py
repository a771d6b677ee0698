"""`dapcal serve`: a model as an HTTP service."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from dapcal.cli.common import INTERRUPTED, Device, Factory, Json, Key, Quiet, checked, output, too_few, typer
from dapcal.records import ALPHA, LEVEL

_SHORTEST, _LONGEST = 16, 4096  # characters of a token


def serve(
    model: Annotated[Path, typer.Argument(readable=False, help="What `dapcal fit` or `dapcal calibrate` wrote.")],
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    alpha: Annotated[float, typer.Option(min=0, max=1, help="Rows with a p-value up to this are flagged.")] = ALPHA,
    level: Annotated[float, typer.Option(help="Probability that an interval holds the target (regression).")] = LEVEL,
    most_rows: Annotated[int, typer.Option(min=1, help="Rows of one batch, at most.")] = 1000,
    most_connections: Annotated[int, typer.Option(min=1, help="Open at a time, at most, of each worker.")] = 1000,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes that answer, each with a model of its own; one for every core or so.")
    ] = 1,
    token_file: Annotated[
        Path | None,
        typer.Option(readable=False, help="File with a token that requests must carry (Authorization: Bearer …)."),
    ] = None,
    cert: Annotated[
        Path | None, typer.Option(readable=False, help="For HTTPS: file with the certificate chain (PEM).")
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(readable=False, help="File with its private key; by default in --cert's file.")
    ] = None,
    access_log: Annotated[
        Path | None,
        typer.Option(readable=False, help="File to append a line of JSON to for every answer; - is standard error."),
    ] = None,
    factory: Factory = None,
    key: Key = None,
    device: Device = "cpu",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Answer requests over HTTP: POST /predict and /predict/batch, GET /health, /ready, /metrics and /openapi.json.

    Ends with Ctrl-C or a SIGTERM, after the requests that it has taken. With a SIGHUP it goes on with what the model's
    file holds then, and opens the access log again.

    Example: dapcal serve house.dap --port 8000
    """
    with output(as_json, quiet) as said, _hangups_heard() as is_stale:
        from dapcal.cli.serving import Loading, Log
        from dapcal.serve import Limits, Security, Served, Work, run, run_several

        if not 0 < level < 1:
            raise ValueError(f"Expected --level between 0 and 1, got {level}")
        security = Security(None if token_file is None else _token(token_file), cert, key_file)
        load = Loading(model, factory, checked(device), key, alpha, level)
        log = None if access_log is None else Log(access_log)

        def checked_load() -> Served:
            found = load()
            too_few(said, load.held_out, alpha)
            if load.few is not None:
                said.note(load.few)
            return found

        def again() -> Served:
            found = checked_load()
            said.say(f"Serving {model.name} as it is now")
            return found

        def started(address: str) -> None:
            said.result({"address": address}, f"Serving {model.name} at {address}; Ctrl-C ends it")

        limits = Limits(rows=most_rows, connections=most_connections)
        try:
            first = checked_load()  # for several too: what is wrong with the file is said before any of them begins
            if workers > 1:
                del first  # each loads its own, after whatever SIGHUP has come so far
                run_several(Work(load, limits, security, log), workers, host, port, started)
                return
            access = None if log is None else log()
            run(first, host, port, limits, started, security=security, access=access, again=again, is_stale=is_stale)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


@contextmanager
def _hangups_heard() -> Iterator[Callable[[], bool]]:
    """Whether a SIGHUP has come so far, which would end the process while libraries and the model are loaded."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGHUP, lambda number, _: came.append(number))
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGHUP, before)


def _token(path: Path) -> str:
    """What a file holds, without the space around it."""
    way = f"make one with: openssl rand -hex 32 > {'token' if path.is_dir() else path}"
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(_LONGEST + 1).strip()  # a device has no end
    except OSError as error:
        raise ValueError(f"--token-file {path} cannot be read ({error.strerror}); {way}") from error
    if not _SHORTEST <= len(text) <= _LONGEST or not (text.isascii() and text.isprintable() and " " not in text):
        held = (
            "nothing" if not text else f"{'more than ' * (len(text) > _LONGEST)}{min(len(text), _LONGEST)} characters"
        )
        raise ValueError(
            f"Expected --token-file {path} to hold a token of {_SHORTEST} to {_LONGEST} ASCII characters and no space, "
            f"got {held}; {way}"
        )
    return text
