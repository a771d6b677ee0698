"""The nodes of a Ray cluster: how to reach them, and which versions they run.

A cluster is started as Ray's documentation says: `ray start --head` on one machine, `ray start --address=host:port` on
the others. A command of dapcal runs on any of them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_SECONDS = 5.0  # to reach a head
_START = "start one with `ray start --head`, and `ray start --address=HOST:PORT` on every further machine"


def library() -> Any:
    """The package ray."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("The engine ray needs Ray; install it with: pip install 'dapcal[ray]'") from error
    return ray


def connect(address: str | None = None) -> None:
    """Reach a cluster that runs; where this process has a connection already, that one stays."""
    # read when Ray is imported: news of lost workers would go to standard output, among the words of a command
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # its lines of log; what is wrong is raised
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what Ray is going to do, without its warning
    ray = library()
    if ray.is_initialized():
        return
    if address is not None:
        _check_reachable(address)
    try:
        with _unlogged():
            ray.init(address=address or "auto", log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except ray.exceptions.AuthenticationError as error:
        raise PermissionError(_told("The Ray cluster asks for its token", error, "set RAY_AUTH_MODE=token and "
                                    "RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) as on its head")) from None  # fmt: skip
    except ConnectionError:
        if address is not None:
            raise ConnectionError(
                f"The Ray cluster at {address} does not answer this machine; is its token right (RAY_AUTH_MODE=token, "
                "and RAY_AUTH_TOKEN as on its head)?"
            ) from None
        raise ConnectionError(f"There is no Ray cluster on this machine; {_START}, or name one by --address") from None
    except RuntimeError as error:  # another version of Ray or of Python on the head
        raise RuntimeError(_told("The Ray cluster refused", error, "see `ray status` there")) from None


@contextmanager
def _unlogged() -> Iterator[None]:
    """Without what Ray's compiled part writes to standard error at every try, before it reads its log level."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def versions() -> dict[str, str]:
    """Of what a result depends on, here."""
    return _look()()


def nodes_of() -> dict[str, dict[str, str]]:
    """Versions on every node of the cluster that is alive, by its address and the beginning of its name."""
    ray = library()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=0)(_look())
    asked = {
        f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})": look.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in ray.nodes()
        if node["Alive"]
    }
    found = {}
    for name, reference in asked.items():
        try:
            found[name] = ray.get(reference)
        except ray.exceptions.RayError:  # gone since, or broken: its own logs say why
            found[name] = {}
    return found


def check_versions(nodes: Mapping[str, Mapping[str, str]], expected: Mapping[str, str] | None = None) -> None:
    """Refuse nodes whose results could differ from those of this process."""
    expected = versions() if expected is None else expected
    for name, found in nodes.items():
        other = [f"{what} {found.get(what) or 'not installed'} where {v} runs here" for what, v in expected.items()
                 if found.get(what) != v]  # fmt: skip
        if found and other:
            raise ValueError(
                f"{name} of the Ray cluster has {', '.join(other)}; install the same versions on all nodes, and start "
                "Ray there again"
            )


def cpus() -> int:
    """Of all nodes."""
    return max(1, int(library().cluster_resources().get("CPU", 0)))


def _look() -> Any:
    """A function that travels as a whole, and not by its name: it also runs where dapcal is not installed."""

    def look() -> dict[str, str]:
        import platform
        from importlib import metadata

        found = {"python": platform.python_version()}
        for package in ("dapcal", "torch", "numpy", "scipy", "pyarrow"):
            try:
                found[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                found[package] = ""
        return found

    return look


def _check_reachable(address: str) -> None:
    """Ray itself would wait for a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"Expected --address as HOST:PORT, e.g. 10.0.0.1:6379, got {address!r}")
    try:
        socket.create_connection((host, int(port)), _SECONDS).close()
    except OSError as error:
        reason = error.strerror or error
        raise ConnectionError(f"There is no Ray cluster at {address} ({reason}); {_START}") from None


def _told(what: str, error: Exception, remedy: str) -> str:
    """The first line of an error of Ray's, between our words."""
    return f"{what} ({str(error).strip().splitlines()[0].rstrip('.')}); {remedy}"
