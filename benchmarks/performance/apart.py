"""A function in a process of its own: its seconds, and the memory that it took beyond what was there before.

Peaks belong to processes, so whoever is measured second in one would be given the first one's.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

RUNS = 3  # of memory, at most: it hardly varies
PAGE = 1 / 256  # MiB: less than that cannot be told from nothing


class Alone(NamedTuple):
    """What one call took."""

    seconds: float
    peak: float  # MiB of resident memory above those before the call
    value: Any  # what it gave back, as JSON knows it


def alone(prepare: Callable[..., Callable[[], Any]], *arguments: Any) -> Alone:
    """Call what `prepare` gives, in a new process.

    Args:
        prepare: a function at the top of a module; what it does itself (data, imports) is not measured.
        arguments: of `prepare`, plain enough for JSON.
    """
    words = [prepare.__module__, prepare.__name__, json.dumps(arguments)]
    done = subprocess.run([sys.executable, "-m", "performance.apart", *words], check=True, stdout=subprocess.PIPE)
    return Alone(*json.loads(done.stdout.splitlines()[-1]))


def peaks(repeats: int, prepare: Callable[..., Callable[[], Any]], *arguments: Any) -> list[float]:
    """Memory of some calls, each `alone`."""
    return [alone(prepare, *arguments).peak for _ in range(min(repeats, RUNS))]


def resident(which: str, process: int | str = "self") -> float:
    """MiB of a process: "VmRSS" now, "VmHWM" at most since it began, or `forget` was called there."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{which}:")) / 1024


def forget() -> None:
    """Let the peak of this process be what it holds now (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def _main(module: str, function: str, arguments: str) -> None:
    call = getattr(importlib.import_module(module), function)(*json.loads(arguments))
    forget()
    before, started = resident("VmRSS"), time.perf_counter()
    value = call()
    took = time.perf_counter() - started
    print(json.dumps(Alone(took, max(resident("VmHWM") - before, PAGE), value)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
