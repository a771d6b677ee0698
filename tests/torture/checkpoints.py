"""Checkpoints damaged in many ways, sealed again or not: a run goes on to the same result, or refuses in one sentence.

`run(count, seed)` damages `count` checkpoints. By hand: `python tests/torture/checkpoints.py 500 0`.
"""

from __future__ import annotations

import hashlib
import io
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import artefacts

import previous_cases
from dapcal.likelihoods import Categorical
from dapcal.posteriors import map as maximum
from dapcal.posteriors._training import checkpoints
from torture.tally import Tally


def run(count: int, seed: int = 0) -> Tally:
    """Damage `count` checkpoints; how many were tried, and a line for each that failed."""
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pt"
        for number in range(count):
            draw = random.Random(f"{seed} {number}")
            damage = draw.choice(DAMAGES)
            content = damage(_half_way(), draw)
            if content == _half_way():
                continue
            path.write_bytes(content)
            trouble = _tried(path, sealed=damage in SEALED)
            if trouble:
                failed.append(f"seed {seed}, checkpoint {number}, {damage.__name__}: {trouble}")
    return Tally("checkpoints", count, failed)


def _tried(path: Path, sealed: bool) -> str:
    found, raised, peak = None, None, artefacts._peak()
    try:
        with warnings.catch_warnings(action="ignore"), artefacts._limited(artefacts.MOST_SECONDS):
            found = _fitted(path)
    except BaseException as error:
        raised = error
    trouble = artefacts._judged(raised, found, None if sealed else _whole())
    return trouble or ("took much memory" if artefacts._peak() - peak > artefacts.MOST_BYTES else "")


def _fitted(path: Path | None, stop: bool = False) -> Tensor:
    """A short training, from a checkpoint or from the start."""

    def told(epoch: Any) -> None:
        if stop and epoch.number == 2:
            raise KeyboardInterrupt

    torch.manual_seed(0)
    found = maximum.fit(
        previous_cases.smooth(), Categorical(), previous_cases._classes(30, 0), epochs=3, batch_size=10,
        checkpoint=path, checkpoint_seconds=0.0, progress=told,
    )  # fmt: skip
    return torch.cat([parameter.detach().flatten() for parameter in found.network.parameters()])


@cache
def _whole() -> Tensor:
    return _fitted(None)


@cache
def _half_way() -> bytes:
    """The checkpoint of a run that was interrupted."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pt"
        try:
            _fitted(path, stop=True)
        except KeyboardInterrupt:
            return path.read_bytes()
    raise AssertionError("the run was not interrupted")


def edited(content: bytes, draw: random.Random) -> bytes:
    """A value in the checkpoint replaced, removed or of another shape, and all of it sealed again."""
    saved = torch.load(io.BytesIO(content), weights_only=True)
    places = [place for place in _places(saved) if place]
    place = draw.choice(places)
    owner = artefacts._at(saved, place[:-1])
    value = owner[place[-1]]
    if draw.random() < 0.2:
        del owner[place[-1]]
    elif isinstance(value, Tensor) and draw.random() < 0.7:
        owner[place[-1]] = draw.choice(
            [value[None], value.flatten()[:0], value.long(), value.double() * torch.nan, value.flatten(), value.bool()]
        )
    else:
        owner[place[-1]] = draw.choice([None, -1, 0, 2**40, 2**70, 1.5, "x", [], {}, torch.zeros(2), True, (1, 2)])
    file = io.BytesIO()
    torch.save(saved, file)
    return resealed(file.getvalue(), draw)


def resealed(content: bytes, draw: random.Random) -> bytes:
    """Bytes damaged, or none, with a seal that is right."""
    if content.endswith(content[-64:]) and checkpoints._SEAL in content[-checkpoints._SEALED :]:
        content = draw.choice(artefacts.BEHIND[:5])(content[: -checkpoints._SEALED], draw)
    return content + checkpoints._SEAL + hashlib.sha256(content).hexdigest().encode()


def _places(tree: Any, start: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    found = [(*start, key) for key in keys]
    return found + [place for key in keys for place in _places(tree[key], (*start, key))]


SEALED: tuple[Callable[[bytes, random.Random], bytes], ...] = (edited, resealed)
DAMAGES = (*artefacts.BEHIND[:5], edited, edited, edited, resealed)


if __name__ == "__main__":
    found = run(int(sys.argv[1]), int(sys.argv[2]))
    print("\n".join(found.failed[:: max(1, len(found.failed) // 30)]))
    print(f"tried {found.tried}, failed {len(found.failed)}")
