"""Artefacts damaged in many ways, with and without a recomputed checksum: each loads, or is refused in one sentence.

`run(count, seed)` damages `count` files. A file fails the trial where reading it or predicting from it raises anything
but a ValueError or OSError of one sentence, takes much memory or time, or where a file that was damaged behind its
checksum predicts something else. Of files of this version half stay on disk as far as they may (`dapcal.in_file`), in
blocks of a few numbers, so that damage shows when they are used. By hand: `python tests/torture/artefacts.py 2000 0`.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import index_models
import table_models

import dapcal
import previous_cases
import test_artifact
from artefact_bytes import header_and_data, opened, sealed, with_header
from dapcal import blocks, container, models, trying
from torture.tally import Tally

MOST_BYTES = 256 << 20  # that reading a file of some kilobytes may take beside what was taken before
MOST_SECONDS = 60  # a file may ask for ten thousand draws
ALLOWED = (ValueError, OSError)


def run(count: int, seed: int = 0, further: bool = True) -> Tally:
    """Damage `count` files; how many were tried, and a line for each that failed.

    Without the `further` classes, which have to be fitted first, a hundred files take about a second.
    """
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            trouble = _tried(Path(folder) / "model.dap", random.Random(f"{seed} {number}"), bases(further))
            if trouble:
                failed.append(f"seed {seed}, file {number}: {trouble}")
    return Tally("artefacts", count, failed)


@dataclass(frozen=True)
class Base:
    """An artefact that is whole."""

    name: str
    content: bytes
    predict: Callable[[Path], Tensor]  # reads a file and predicts from it
    is_mapped: bool = False  # what may stay in the file does


@cache
def bases(further: bool) -> tuple[Base, ...]:
    """Those of the previous version, the same saved again by this one, and further classes that may be stored.

    What this version saves is there twice: read, and staying in its file.
    """
    found = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        again = Path(folder) / "again.dap"
        for name, predict in _readers().items():
            path = previous_cases.FOLDER / f"{name}.dap"
            found.append(Base(name, path.read_bytes(), predict))
            found += _saved(f"{name}, again", _load(name, path), again, predict)
        for name in FURTHER if further else ():
            posterior, adjust, space = test_artifact.ROUND_TRIPS[name]
            calibrated = test_artifact.calibrate(posterior(), adjust, space)
            found += _saved(name, calibrated, again, partial(_predicted_further, name))
        for name, made in index_models.kinds().items() if further else ():
            found += _saved(name, made(), again, index_models.predicted)
        for name, fitted in table_models.KINDS.items() if further else ():
            found += _saved(name, fitted(), again, table_models.predicted)
    return tuple(found)


def _saved(name: str, model: Any, path: Path, predict: Callable[[Path], Tensor]) -> Iterator[Base]:
    for is_mapped in (False, True):
        with staying(is_mapped):
            model.save(path)
            yield Base(f"{name}{', mapped' * is_mapped}", path.read_bytes(), predict, is_mapped)


@contextmanager
def staying(is_mapped: bool) -> Iterator[None]:
    """Have small tensors stay in their file, too, in several blocks."""
    before = container.LARGE, blocks.BLOCK, trying._ROWS
    if is_mapped:
        container.LARGE, blocks.BLOCK, trying._ROWS = 1, 256, 3
    try:
        yield
    finally:
        container.LARGE, blocks.BLOCK, trying._ROWS = before


FURTHER = (
    "smooth", "prior Monte Carlo", "transport", "shift", "full, transport", "state dicts with a prior, reweight",
    "batch norm, inflate", "unit features of a named layer", "random Fourier, transport", "VAE, reweight",
    "k-th neighbour, no radius", "Hausdorff, full", "nearest class", "MMD",
)  # fmt: skip
"""Of tests/test_artifact.py."""


def _predicted_further(name: str, path: Path) -> Tensor:
    model = test_artifact.with_batch_norm() if "batch norm" in name else test_artifact.network()
    return _numbers(dapcal.load(path, model)(test_artifact.X))


def _readers() -> dict[str, Callable[[Path], Tensor]]:
    return {name: partial(_predicted, name) for name in (*previous_cases.CORE, "network", *_TABLES)}


_TABLES = ("table-classification", "table-regression")


def _load(name: str, path: Path) -> Any:
    if name in previous_cases.CORE:
        return dapcal.load(path, previous_cases.CORE[name]())
    return models.load(path) if name in _TABLES else models.load(path, previous_cases.smooth())


def _predicted(name: str, path: Path) -> Tensor:
    loaded = _load(name, path)
    if name in previous_cases.CORE:
        return _numbers(loaded(previous_cases.inputs()))
    if name in _TABLES:
        import pyarrow as pa

        table = loaded.predict(pa.table(previous_cases.asked_rows())).table
        loaded.fields()
        return torch.tensor([*table["epistemic"].to_pylist(), *table["ood_p_value"].to_pylist()], dtype=torch.float64)
    columns = loaded.columns(previous_cases.inputs())
    return torch.cat([torch.as_tensor(columns[name]).double().flatten() for name in ("epistemic", "ood_p_value")])


def _numbers(prediction: dapcal.Prediction) -> Tensor:
    prediction.reasons()
    return torch.cat([prediction.mean.flatten().double(), prediction.ood_p_value])


@cache
def _whole(base: Base) -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.dap"
        path.write_bytes(base.content)
        return base.predict(path)


def _tried(path: Path, draw: random.Random, among: tuple[Base, ...]) -> str:
    """What is wrong with how a damaged file was received; empty if nothing is."""
    base = draw.choice(among)
    with staying(base.is_mapped):
        return _received(path, draw, base)


def _received(path: Path, draw: random.Random, base: Base) -> str:
    damage = draw.choice(DAMAGES)
    content = damage(base.content, draw)
    if content == base.content:
        return ""
    path.write_bytes(content)
    kept = content if damage in SEALED else b""
    expected = _whole(base)
    before, began, raised = _peak(), time.monotonic(), None
    found = None
    try:
        with warnings.catch_warnings(action="ignore"), _limited(MOST_SECONDS):
            found = base.predict(path)
    except BaseException as error:  # whatever it is, it is told
        raised = error
    trouble = _judged(raised, found, None if kept else expected)
    if _peak() - before > MOST_BYTES:
        trouble = trouble or f"took {(_peak() - before) >> 20} MiB"
    if time.monotonic() - began > MOST_SECONDS:
        trouble = trouble or f"took {time.monotonic() - began:.0f} s"
    return f"{base.name}, {damage.__name__}: {trouble}" if trouble else ""


def _judged(raised: BaseException | None, found: Tensor | None, expected: Tensor | None) -> str:
    if raised is None:
        differs = expected is not None and not torch.equal(found, expected)
        return "predicts something else, unnoticed" if differs else ""
    text = str(raised)
    if not isinstance(raised, ALLOWED):
        last = traceback.extract_tb(raised.__traceback__)[-1]
        return f"{type(raised).__name__}: {text[:200]} ({Path(last.filename).name}:{last.lineno})"
    if "\n" in text or not text.strip() or len(text) > 1000:
        return f"not one sentence: {text[:200]!r}"
    return ""


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def end(*_: object) -> None:
        raise TimeoutError_(f"still at work after {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class TimeoutError_(BaseException):
    """Not an OSError, as Python's own is."""


# Damage behind the checksum's back: bytes of the file


def flipped(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content) if draw.random() < 0.5 else min(len(content), 400))
    return content[:place] + bytes([content[place] ^ (1 << draw.randrange(8))]) + content[place + 1 :]


def truncated(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.choice([0, 4, 8, 9, draw.randrange(len(content)), len(content) - 1])]


def lengthened(content: bytes, draw: random.Random) -> bytes:
    return content + draw.randbytes(draw.choice([1, 8, 4096]))


def zeroed(content: bytes, draw: random.Random) -> bytes:
    start, length = draw.randrange(len(content)), draw.choice([1, 8, 64, 4096])
    return content[:start] + bytes(len(content[start : start + length])) + content[start + length :]


def moved(content: bytes, draw: random.Random) -> bytes:
    start, length, to = draw.randrange(len(content)), draw.choice([1, 8, 512]), draw.randrange(len(content))
    part, rest = content[start : start + length], content[:start] + content[start + length :]
    return rest[:to] + part + rest[to:]


def another_head_length(content: bytes, draw: random.Random) -> bytes:
    length = struct.unpack("<Q", content[:8])[0]
    other = draw.choice([0, 1, 2, length - 1, length + 1, length + 8, 2**31, 2**62, 2**64 - 1])
    return struct.pack("<Q", other) + content[8:]


def edited_head(content: bytes, draw: random.Random) -> bytes:
    """The table of tensors changed, the checksum not."""
    header, data = header_and_data(content)
    name = draw.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    key = draw.choice(["dtype", "shape", "data_offsets", "entry", "name"])
    if key == "dtype":
        entry[key] = draw.choice(["F64", "F32", "I64", "BOOL", "U8", "BF16", "F4", "X", 3, None])
    elif key == "shape":
        entry[key] = draw.choice(
            [entry[key][::-1], [2**40], [2**40, 2**40], [0, 2**60], [-1], [1.5], "x", None, [True]]
        )
    elif key == "data_offsets":
        entry[key] = draw.choice([[0, 0], [0, 2**50], [-8, 0], [8, 0], entry[key][::-1], [0.0, 8.0], "x", [1], None])
    elif key == "entry":
        header[name] = draw.choice([None, [], 3, "x", {}, header[next(iter(header))]])
    else:
        header[draw.choice(["", "x", "__metadata__", name * 50])] = header.pop(name)
    return with_header(header, data)


def nested_head(content: bytes, draw: random.Random) -> bytes:
    depth = draw.choice([200, 2000, 100_000])
    text = b'{"__metadata__":' + draw.choice([b"[", b'{"a":']) * depth
    return struct.pack("<Q", len(text)) + text


# Damage with a checksum that is made again


def edited_tree(content: bytes, draw: random.Random) -> bytes:
    """A value of the tree of objects replaced, removed, copied or swapped."""
    description, tensors = opened(content)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        _edit(description["tree"], draw, description["tree"])
    return sealed(description, tensors)


def edited_about(content: bytes, draw: random.Random) -> bytes:
    """The same with the description beside the tree."""
    description, tensors = opened(content)
    part = "about" if description["about"] else "tree"
    for _ in range(draw.choice([1, 1, 2])):
        _edit(description[part], draw, description[part])
    return sealed(description, tensors)


def edited_description(content: bytes, draw: random.Random) -> bytes:
    description, tensors = opened(content)
    key = draw.choice(list(description))
    if draw.random() < 0.3:
        del description[key]
    else:
        description[key] = _odd(draw, description)
    return sealed(description, tensors)


def huge_sizes(content: bytes, draw: random.Random) -> bytes:
    """Whole numbers made large, as in the shapes of a layout or the widths of a network."""
    description, tensors = opened(content)
    places = [place for place in _places(description) if type(_at(description, place)) is int]
    if places:
        place = draw.choice(places)
        _at(description, place[:-1])[place[-1]] = draw.choice([10**4, 10**6, 10**9, 2**31, 2**62, 2**63, 2**70, -1, 0])
    return sealed(description, tensors)


def another_kind(content: bytes, draw: random.Random) -> bytes:
    """An object of another class, with the same fields."""
    description, tensors = opened(content)
    places = [place for place in _places(description["tree"]) if place and place[-1] == "kind"]
    place = draw.choice(places)
    kinds = [_at(description["tree"], other) for other in places]
    more = ["Identity", "Exp", "Prior", "Calibrated", "Tensor", "DiagonalGaussian", "Reweight", "MMD", "Hausdorff", ""]
    _at(description["tree"], place[:-1])["kind"] = draw.choice([*kinds, *more, None, 3, ["x"]])
    return sealed(description, tensors)


def deep_tree(content: bytes, draw: random.Random) -> bytes:
    description, tensors = opened(content)
    depth = draw.choice([50, 300, 900, 50_000])
    start, end = draw.choice([('{"tuple": [', "]}"), ('{"dict": {"a": ', "}}"), ("[", "]")])
    part = draw.choice(["tree", "about"])
    place = draw.choice(_places(description[part]) or [()])
    if place:
        _at(description[part], place[:-1])[place[-1]] = "the depth"
    return sealed(json.dumps(description).replace('"the depth"', start * depth + "1" + end * depth), tensors)


def edited_tensor(content: bytes, draw: random.Random) -> bytes:
    """A tensor of another shape, type or values."""
    description, tensors = opened(content)
    name = draw.choice(list(tensors))
    tensor = tensors[name]
    changes: list[Callable[[], Tensor]] = [
        lambda: tensor.flatten(),
        lambda: tensor[None],
        lambda: tensor.mT.contiguous() if tensor.ndim > 1 else tensor[:, None],
        lambda: tensor[:0],
        lambda: tensor[:1] if tensor.ndim else tensor,
        lambda: tensor[: len(tensor) // 2] if tensor.ndim else tensor,
        lambda: torch.cat([tensor, tensor]) if tensor.ndim else tensor,
        lambda: tensor.new_zeros(()),
        lambda: tensor.new_empty(0),
        lambda: torch.empty(0, 2**40),
        lambda: torch.zeros_like(tensor),
        lambda: -tensor.long() - 1,
        lambda: tensor.double().float(),
        lambda: tensor.double(),
        lambda: tensor.half(),
        lambda: tensor.bfloat16(),
        lambda: tensor.long(),
        lambda: tensor.bool(),
        lambda: tensor.to(torch.uint8),
        lambda: tensor + 1000,
        lambda: tensor * (1e30 if tensor.is_floating_point() else 10**9),
        lambda: torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else tensor + 1,
        lambda: torch.full_like(tensor, torch.inf) if tensor.is_floating_point() else tensor.long() - 1,
    ]
    changed = draw.choice(changes)().contiguous().clone()
    if draw.random() < 0.3 and changed.shape == tensor.shape and tensor.numel():  # one number alone
        place = draw.randrange(tensor.numel())
        changed = (
            tensor.clone()
            .flatten()
            .to(changed.dtype)
            .index_copy(0, torch.tensor([place]), changed.flatten()[place : place + 1])
            .reshape(tensor.shape)
        )
    tensors[name] = changed
    return sealed(description, tensors)


def exchanged_tensors(content: bytes, draw: random.Random) -> bytes:
    description, tensors = opened(content)
    one, two = draw.choice(list(tensors)), draw.choice(list(tensors))
    way = draw.choice(["swap", "remove", "rename", "add"])
    if way == "swap":
        tensors[one], tensors[two] = tensors[two], tensors[one]
    elif way == "remove":
        del tensors[one]
    elif way == "rename":
        tensors[draw.choice(["", "x", f"{one}.", f"further.{one}"])] = tensors.pop(one)
    else:
        tensors[f"further.{one}"] = tensors[one].clone()
    return sealed(description, tensors)


BEHIND = (flipped, truncated, lengthened, zeroed, moved, another_head_length, edited_head, nested_head)
SEALED = (
    edited_tree, edited_tree, edited_tree, edited_about, edited_about, edited_description, huge_sizes, huge_sizes,
    another_kind, deep_tree, edited_tensor, edited_tensor, edited_tensor, exchanged_tensors,
)  # fmt: skip
DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (*BEHIND, *SEALED)


def _edit(tree: Any, draw: random.Random, all_of_it: Any) -> None:
    places = [place for place in _places(tree) if place]
    if not places:
        return
    place = draw.choice(places)
    owner, key = _at(tree, place[:-1]), place[-1]
    way = draw.choice(["odd", "odd", "odd", "remove", "copy", "swap", "add", "rename"])
    if way == "remove":
        del owner[key]
    elif way == "copy":
        owner[key] = copy.deepcopy(_at(all_of_it, draw.choice(_places(all_of_it))))
    elif way == "swap" and len(owner) > 1:
        keys = list(range(len(owner))) if isinstance(owner, list) else list(owner)
        other = draw.choice(keys)
        owner[key], owner[other] = owner[other], owner[key]
    elif way == "add":
        owner.append(copy.deepcopy(owner[0])) if isinstance(owner, list) else owner.update(surprise=_odd(draw, tree))
    elif way == "rename" and isinstance(owner, dict):
        owner[f"{key}x"] = owner.pop(key)
    else:
        owner[key] = _odd(draw, all_of_it)


def _odd(draw: random.Random, tree: Any) -> Any:
    texts = ["", "x", "nan", "inf", "-inf", "0x1p+0", "1e999", "\x1b[31m", "é" * 200, "0x1p+99999"]
    values = [None, True, False, 0, -1, 1, 3, 2**31, 2**63, 2**70, 1.5, -1.5, *texts, [], {}, [[]], [1, 2], {"a": 1}]
    nodes = [
        *({"float": text} for text in (*texts, 3, None)), {"float": (-1.0).hex()}, {"float": (0.0).hex()},
        {"tensor": "x"}, {"tensor": None}, {"tensor": []}, {"tuple": []}, {"tuple": 3}, {"tuple": [1]}, {"dict": {}},
        {"dict": []}, {"dict": {"": 1}}, {"network": True}, {"again": "calibrated"}, {"again": "calibrated.posterior"},
        {"again": []}, {"given": "model", "label": "model", "type": "x"}, {"given": "model"}, {"given": []},
        {"given": "projector", "label": "x", "type": "y"}, {"given": "likelihood", "label": "x", "type": "y"},
        {"kind": "Exp", "fields": {}}, {"kind": "Exp"}, {"kind": "Exp", "fields": []}, {"fields": {}},
        {"kind": "Gaussian", "fields": {"noise": {"float": "nan"}}}, {"kind": "Identity", "fields": {"a": 1}},
    ]  # fmt: skip
    tensors = [{"tensor": name} for name in _named(tree)]
    return copy.deepcopy(draw.choice([draw.choice(values), draw.choice(nodes), draw.choice(tensors or values)]))


def _named(tree: Any) -> list[str]:
    return [v["tensor"] for v in map(partial(_at, tree), _places(tree)) if isinstance(v, dict) and "tensor" in v]


def _places(tree: Any, start: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value that is nested in a value."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    found = [(*start, key) for key in keys]
    return found + [place for key in keys for place in _places(tree[key], (*start, key))]


def _at(tree: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        tree = tree[key]
    return tree


if __name__ == "__main__":
    found = run(int(sys.argv[1]), int(sys.argv[2]))
    print("\n".join(found.failed[:: max(1, len(found.failed) // 40)]))
    print(Counter(line.split(": ")[2].split(" ")[0] for line in found.failed).most_common())
    print(f"tried {found.tried}, failed {len(found.failed)}")
