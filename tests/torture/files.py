"""Tables, arrays, images and weights damaged in many ways, given to the commands that read them.

`run(count, seed)` tries `count` files. A trial fails where a command ends with a traceback, with other exit codes than
0, 1 and 2, with no words or many lines, where it takes much memory or time, or where a command that was refused has
touched the file that it should have replaced. By hand: `python tests/torture/files.py 500 0`.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import random
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import artefacts

import previous_cases
from dapcal.cli import app
from dapcal.models import arrays, network_fitting
from torture.tally import Tally

BEFORE = "what was there before\n"
Trial = tuple[str, list[str]]  # what was damaged, and the command


def run(count: int, seed: int = 0, kinds: tuple[str, ...] = ()) -> Tally:
    """Try `count` files of some kinds or all; how many were tried, and a line for each that failed."""
    failed, before = [], Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for number in range(count):
                draw = random.Random(f"{seed} {number}")
                kind = draw.choice(kinds or (TABLES if draw.random() < TABLES_OF_ALL else OTHERS))
                trouble = _tried(KINDS[kind], draw)
                if trouble:
                    failed.append(f"seed {seed}, file {number}, {kind}: {trouble}")
        finally:
            os.chdir(before)
    return Tally("files", count, failed)


def _tried(make: Callable[[random.Random], Trial], draw: random.Random) -> str:
    for left in Path().iterdir():
        if left.is_file():
            left.unlink()
    with warnings.catch_warnings(action="ignore"):
        what, command = make(draw)
    out = Path(command[command.index("-o") + 1])
    out.write_text(BEFORE)
    peak, began = artefacts._peak(), time.monotonic()
    with warnings.catch_warnings(action="ignore"):
        result = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=True)
    trouble = ""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        error = result.exception
        last = traceback.extract_tb(error.__traceback__)[-1]
        trouble = f"{type(error).__name__}: {str(error)[:160]} ({Path(last.filename).name}:{last.lineno})"
    elif result.exit_code not in (0, 2):
        trouble = f"exit code {result.exit_code}: {result.output[:200]}"
    elif result.exit_code and out.read_text(errors="replace") != BEFORE:
        trouble = "refused, and the output was replaced"
    elif result.exit_code and len(_message(result.stdout)) not in range(15, 1200):
        trouble = f"no sentence: {result.output[:200]}"
    elif result.exit_code == 0 and out.read_bytes() == BEFORE.encode():
        trouble = "nothing was written"
    elif any(character < " " and character not in "\n\t\r" for character in result.output):
        trouble = f"control characters: {result.output[:200]!r}"
    if artefacts._peak() - peak > artefacts.MOST_BYTES:
        trouble = trouble or f"took {(artefacts._peak() - peak) >> 20} MiB"
    if time.monotonic() - began > artefacts.MOST_SECONDS:
        trouble = trouble or f"took {time.monotonic() - began:.0f} s"
    return f"{what}: {trouble}" if trouble else ""


def _message(printed: str) -> str:
    try:
        return str(json.loads(printed.strip().splitlines()[-1])["error"])
    except (ValueError, KeyError, IndexError):
        return ""


# Arrays


def npz_file(draw: random.Random) -> Trial:
    """Inputs of a network, or of a table."""
    what, content = _npz(draw, _one_of_arrays(draw))
    Path("new.npz").write_bytes(content)
    return what, draw.choice([_of_network("new.npz"), _of_tokens("new.npz"), _of_table("new.npz")])


def calibrated_npz(draw: random.Random) -> Trial:
    """Training data of a network."""
    np.savez("good.npz", **_labelled(60))
    what, content = _npz(draw, {**_labelled(60), **({} if draw.random() < 0.5 else _one_of_arrays(draw))})
    Path("bad.npz").write_bytes(content)
    torch.save(previous_cases.smooth().state_dict(), "w.pt")
    train, held_out = draw.choice([("bad.npz", "good.npz"), ("good.npz", "bad.npz")])
    return what, [
        "calibrate", "--model", "previous_cases:smooth", "--weights", "w.pt", "--train", train, "--held-out", held_out,
        "-o", "out.dap",
    ]  # fmt: skip


def _npz(draw: random.Random, named: dict[str, np.ndarray]) -> tuple[str, bytes]:
    if draw.random() < 0.3:
        file = io.BytesIO()
        np.savez(file, **named)
        return _bytes(file.getvalue(), draw)
    return "another head of an array", _with_head(draw, named)


def _with_head(draw: random.Random, named: dict[str, np.ndarray]) -> bytes:
    """A whole zip file, in which the head of an array says something else than its bytes."""
    heads = [
        None, None, (2**40, 2), (2**33, 2**33), (2**62, 4), (2**64, 2), (-1, 2), (8.0, 2), ("8", 2), (True, 2), (0, 2),
        (8,), (), (8, 2, 1), (8, 3), 8, None, (2,) * 40, (4, 2),
    ]  # fmt: skip
    types = [
        "<f4", "<f8", ">f8", "<f2", "<f16", "<i8", "<i4", "<u8", "|u1", "|b1", "<c8", "|O", "|V8", "<U5", "|S3",
        "<M8[s]", "<m8", "<U0", "x", "", 3, [("a", "<f4")], "<f999", "|V999999999", "<U2147483647",
    ]  # fmt: skip
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", draw.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
        for name, values in named.items():
            shape = draw.choice(heads)
            head = {
                "descr": draw.choice(types) if draw.random() < 0.6 else values.dtype.str,
                "fortran_order": draw.choice([False, False, True, 1, "x"]),
                "shape": values.shape if shape is None else shape,
            }
            if draw.random() < 0.1:
                del head[draw.choice(list(head))]
            text = repr(head) if draw.random() < 0.95 else draw.choice(["", "[" * 5000, "{", "1+1", "\0", "é"])
            text = text.encode("latin1") + b"\n"
            version = draw.choice([b"\x01\x00", b"\x01\x00", b"\x01\x00", b"\x02\x00", b"\x09\x00"])
            length = struct.pack("<H" if version == b"\x01\x00" else "<I", len(text))
            data = values.tobytes() * draw.choice([0, 1, 1, 1, 2])
            archive.writestr(f"{name}.npy", b"\x93NUMPY" + version + length + text + data)
        if draw.random() < 0.1:
            archive.writestr(
                draw.choice(["x.npy", "note.txt", "../x.npy", "\x1b[31m.npy", "a" * 300 + ".npy"]), b"hello"
            )
    return file.getvalue()


def _one_of_arrays(draw: random.Random) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
    tokens = np.arange(24).reshape(8, 3) % 10
    odd = [
        x, x, x * 1e38, x * np.float32(np.nan), x.astype(np.float64) * 1e300, x.astype(np.float16), x.astype(int),
        x > 0, x.astype(np.uint8), x[:, :1], x[:0], x[None], x.astype("U8"), x.astype(complex), x.T, tokens,
        tokens - 1,
        tokens + 5, tokens * 2**40, tokens + 0.5, tokens.astype(np.float32), tokens.astype(np.int32), tokens[:, :1],
        tokens.astype(np.uint16), tokens.astype(np.int8),
    ]  # fmt: skip
    name = draw.choice(["x", "x", "x", "x", "y", "area", "\x1b[31mred", ""])
    more = {"city": np.array(["Rome"] * 8), "area": np.arange(8.0)} if draw.random() < 0.3 else {}
    return {name or "x": draw.choice(odd), **more}


def _labelled(n: int) -> dict[str, np.ndarray]:
    x, y = previous_cases._classes(n, 0)
    return {"x": x.numpy(), "y": y.numpy()}


# Images


def image_folder(draw: random.Random) -> Trial:
    """A folder with one image that is wrong."""
    from PIL import Image

    Path("new").mkdir(exist_ok=True)
    for old in Path("new").iterdir():
        old.unlink()
    suffix = draw.choice(["png", "jpg", "gif", "bmp", "webp", "tiff"])
    mode = draw.choice(["L", "RGB", "RGBA", "1", "P", "I;16", "F", "CMYK", "LA"])
    size = draw.choice([(4, 4), (4, 4), (1, 1), (5, 3), (1, 30_000)])
    file = io.BytesIO()
    try:
        Image.new(mode, size, 1).save(file, "JPEG" if suffix == "jpg" else suffix.upper())
    except (OSError, ValueError):
        Image.new("L", size, 1).save(file, "PNG")
    content = file.getvalue()
    what = f"{mode} {suffix} {size}"
    if draw.random() < 0.3:
        what, content = "a PNG of many pixels", huge_png(draw.choice([2**31 - 1, 2**16, 30_000]))
    elif draw.random() < 0.8:
        damage, content = _bytes(content, draw)
        what += f", {damage}"
    Path("new", draw.choice(["a", "\x1b[31mred", "a\nb", "=1+1"]) + f".{suffix}").write_bytes(content)
    Image.new("L", (4, 4)).save("new/b.png")
    resize = draw.choice([[], ["--resize"]])
    return what, ["predict", str(_picture_model()), "new", "--model", "files:picture_network", "-o", "out.csv", *resize]


def huge_png(side: int) -> bytes:
    """Of few bytes and many pixels."""
    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 1000)), (b"IEND", b"")]
    parts = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


# Weights


def weights(draw: random.Random) -> Trial:
    """Weights of a network that is to be calibrated."""
    np.savez("train.npz", **_labelled(60))
    state = previous_cases.smooth().state_dict()
    odd: list[Callable[[], Any]] = [
        lambda: state, lambda: {}, lambda: [], lambda: None, lambda: 3, lambda: "x", lambda: {"state_dict": state},
        lambda: {"state_dict": 3}, lambda: {**state, "extra": torch.zeros(1)}, lambda: {**state, 3: torch.zeros(1)},
        lambda: {name: tensor * torch.nan for name, tensor in state.items()}, lambda: {**state, "0.weight": "x"},
        lambda: {name: tensor[None] for name, tensor in state.items()}, lambda: {"\x1b[31m": torch.zeros(2)},
        lambda: {name: tensor.long() for name, tensor in state.items()},
        lambda: {name: tensor.to(torch.complex64) for name, tensor in state.items()},
        lambda: {name: tensor.to_sparse() for name, tensor in state.items()},
        lambda: {name: torch.empty(tensor.shape, device="meta") for name, tensor in state.items()},
        lambda: {name: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8) for name, tensor in state.items()},
        lambda: {name: torch.zeros(1).expand(*tensor.shape) for name, tensor in state.items()},
        lambda: {name: torch.nested.nested_tensor([tensor]) for name, tensor in state.items()},
        lambda: previous_cases.smooth(), lambda: {"0.weight": torch.zeros(1).expand(2**40)},
        lambda: torch.optim.Adam(previous_cases.smooth().parameters()).state_dict(),
        lambda: {name: tensor.double() * 1e300 for name, tensor in state.items()},
    ]  # fmt: skip
    name = draw.choice(["w.pt", "w.pt", "w.safetensors"])
    made = draw.choice(odd)()
    file = io.BytesIO()
    if name == "w.pt":
        torch.save(made, file, _use_new_zipfile_serialization=draw.random() < 0.8)
        content = file.getvalue()
    else:
        from safetensors.torch import save

        content = save({key: tensor.clone() for key, tensor in state.items()})
    what = f"{name} of {type(made).__name__}"
    if draw.random() < 0.5:
        damage, content = _bytes(content, draw)
        what += f", {damage}"
    Path(name).write_bytes(content)
    return what, [
        "calibrate", "--model", "previous_cases:smooth", "--weights", name, "--train", "train.npz", "--held-out",
        "train.npz", "-o", "out.dap",
    ]  # fmt: skip


# Tables


def table(draw: random.Random) -> Trial:
    """Rows to predict, and now and then to fit."""
    suffix = draw.choice([".csv", ".csv", ".csv", ".tsv", ".csv.gz", ".parquet", ".npz"])
    content = _table(draw, suffix)
    what = suffix
    if suffix != ".npz" and draw.random() < 0.5:
        damage, content = _bytes(content, draw)
        what += f", {damage}"
    name = f"new{suffix}"
    Path(name).write_bytes(content)
    if draw.random() < 0.05:
        return what, ["fit", name, "--target", "target", "-o", "out.dap", "--fast", "--epochs", "1", "--hidden", "4"]
    keep = draw.choice([[], [], ["--keep", "city"], ["--keep", "\x1b[31m"], ["--keep", "area", "--keep", "city"]])
    out = draw.choice(["out.csv", "out.csv", "out.tsv", "out.parquet"])
    return what, ["predict", str(previous_cases.FOLDER / f"{_TABLE}.dap"), name, "-o", out, *keep]


_TABLE = "table-regression"
_CELLS = [
    "1", "-1", "1e308", "1e309", "-1e-320", "nan", "inf", "", " ", "NA", "x", "=1+1", '"', '""', "'", ",", "\n", "\r",
    "\0", "\x1b[31m", "é", "\ufeff", "1,5", "1_000", "0x10", "١", "9" * 400, "a" * 100_000, "true", "2020-01-01",
    "\u202e", "\t",
]  # fmt: skip


def _table(draw: random.Random, suffix: str) -> bytes:
    rows = draw.choice([0, 1, 5, 40])
    columns: dict[str, list[str]] = {
        "area": [str(50 + i) for i in range(rows)], "city": ["Rome", "Oslo"] * (rows // 2) + ["Lima"] * (rows % 2),
        "target": [str(3 * i % 7) for i in range(rows)],
    }  # fmt: skip
    for _ in range(draw.choice([0, 1, 1, 3])):
        way = draw.choice(["cell", "cell", "cell", "name", "drop", "add", "short"])
        name = draw.choice(list(columns)) if columns else "area"
        if way == "cell" and rows and name in columns and columns[name]:
            columns[name][draw.randrange(len(columns[name]))] = draw.choice(_CELLS)
        elif way == "name" and name in columns:
            columns[draw.choice([*_CELLS, "city", "area"])] = columns.pop(name)
        elif way == "drop":
            columns.pop(name, None)
        elif way == "add":
            columns[draw.choice(_CELLS)] = [draw.choice(_CELLS)] * rows
        elif way == "short" and name in columns:
            columns[name] = columns[name][: rows // 2]
    if suffix in (".parquet", ".npz"):
        whole = {name: values for name, values in columns.items() if len(values) == rows}
        return _parquet(whole, draw) if suffix == ".parquet" else _npz_table(whole, draw)
    return _text(columns, rows, "\t" if suffix == ".tsv" else draw.choice(",,,;|"), draw, suffix)


def _text(columns: dict[str, list[str]], rows: int, separator: str, draw: random.Random, suffix: str) -> bytes:
    file = io.StringIO()
    lines = [list(columns), *([v[i] for v in columns.values() if i < len(v)] for i in range(rows))]
    if draw.random() < 0.7:
        writer = csv.writer(file, delimiter=separator, escapechar="\\")
        writer.writerows(lines)
    else:  # without any quotation marks
        file.write("\n".join(separator.join(line) for line in lines))
    content = file.getvalue().encode(draw.choice(["utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16"]), "replace")
    return gzip.compress(content) if suffix == ".csv.gz" else content


def _parquet(columns: dict[str, list[str]], draw: random.Random) -> bytes:
    made: dict[str, Any] = {}
    for name, values in columns.items():
        kinds: list[Callable[[], pa.Array]] = [
            lambda v=values: pa.array(v), lambda v=values: pa.array(range(len(v))),
            lambda v=values: pa.array([None] * len(v)), lambda v=values: pa.array([[1]] * len(v)),
            lambda v=values: pa.array([b"x"] * len(v)),
            lambda v=values: pa.array([True] * len(v)), lambda v=values: pa.array(v).dictionary_encode(),
            lambda v=values: pa.array([float("inf")] * len(v)), lambda v=values: pa.array([2**62] * len(v)),
        ]  # fmt: skip
        made[name] = draw.choice(kinds)()
    file = io.BytesIO()
    pa.parquet.write_table(pa.table(made), file)
    return file.getvalue()


def _npz_table(columns: dict[str, list[str]], draw: random.Random) -> bytes:
    fine = [name for name in columns if "\0" not in name and "\n" not in name and len(name) < 2**15]  # for a zip file
    named = {name or "x": np.array(columns[name]) for name in fine}
    if named and draw.random() < 0.5:
        return _npz(draw, named)[1]
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, values in named.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, values if values.dtype != object else values.astype(str))
    return file.getvalue()


def _bytes(content: bytes, draw: random.Random) -> tuple[str, bytes]:
    """Damage to the bytes of any file."""
    damage = draw.choice(
        [artefacts.flipped, artefacts.truncated, artefacts.lengthened, artefacts.zeroed, artefacts.moved]
    )
    return damage.__name__, damage(content, draw) if content else content


# What is asked


def _of_network(name: str) -> list[str]:
    path = str(previous_cases.FOLDER / "network.dap")
    return ["predict", path, name, "--model", "previous_cases:smooth", "-o", "out.csv"]


def _of_table(name: str) -> list[str]:
    return ["predict", str(previous_cases.FOLDER / f"{_TABLE}.dap"), name, "-o", "out.csv"]


def _of_tokens(name: str) -> list[str]:
    return ["predict", str(_token_model()), name, "--model", "files:token_network", "-o", "out.csv"]


def token_network() -> torch.nn.Module:
    """Three token ids from 0 to 9 to two classes."""
    nn = torch.nn
    return nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 2))


def picture_network() -> torch.nn.Module:
    """Grey images of 4 × 4 pixels to two classes."""
    nn = torch.nn
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 2))


@cache
def _token_model() -> Path:
    x = torch.randint(10, (120, 3), generator=torch.Generator().manual_seed(0))
    return _model(token_network, x, (x.sum(1) > 13).long(), "tokens")


@cache
def _picture_model() -> Path:
    x = torch.rand(120, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    return _model(picture_network, x, (x.flatten(1).mean(1) > 0.5).long(), "pictures")


_FOLDER = tempfile.TemporaryDirectory()


def _model(make: Callable[[], torch.nn.Module], x: torch.Tensor, y: torch.Tensor, name: str) -> Path:
    torch.manual_seed(0)
    data = [arrays.Labelled(x[half], y[half]) for half in (slice(0, 60), slice(60, None))]
    with warnings.catch_warnings(action="ignore"):
        fitted = network_fitting.fit([make()], *data, factory=f"files:{make.__name__}")
    path = Path(_FOLDER.name) / f"{name}.dap"
    fitted.save(path)
    return path


KINDS: dict[str, Callable[[random.Random], Trial]] = {
    "npz": npz_file, "calibrated npz": calibrated_npz, "images": image_folder, "weights": weights, "table": table,
}  # fmt: skip
TABLES, OTHERS = ("table",), ("npz", "calibrated npz", "images", "weights")
TABLES_OF_ALL = 5 / 8  # of 8,000 files


if __name__ == "__main__":
    found = run(int(sys.argv[1]), int(sys.argv[2]), tuple(sys.argv[3:]))
    print("\n".join(found.failed[:: max(1, len(found.failed) // 40)]))
    print(Counter(line.split(", ")[2].split(":")[0] for line in found.failed).most_common())
    print(f"tried {found.tried}, failed {len(found.failed)}")
