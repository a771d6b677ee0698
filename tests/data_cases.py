"""Data files as the experiments find them, made in a test's own folder."""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from dapcal.experiments.datasets import files


class Places:
    """A data folder and a cache of a test's own; files put there have the checksums that are asked for."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data, self.cache = root / "data", root / "cache"
        self.monkeypatch = monkeypatch
        monkeypatch.setenv("DAPCAL_DATA", str(self.data))
        monkeypatch.setenv("DAPCAL_CACHE", str(self.cache))
        monkeypatch.setitem(sys.modules, "torchvision", None)  # no test goes out
        files.warn_unwritable.cache_clear()

    def put(self, file: str, raw: bytes, *, under: Path | None = None) -> Path:
        path = (under or self.data) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
        self.monkeypatch.setitem(files.SHA256, file, hashlib.sha256(raw).hexdigest())
        return path

    def put_mnist(self, x: np.ndarray, y: np.ndarray, part: str = "t10k") -> list[Path]:
        return [
            self.put(f"mnist/{part}-images-idx3-ubyte.gz", idx(x)),
            self.put(f"mnist/{part}-labels-idx1-ubyte.gz", idx(y)),
        ]


def idx(values: np.ndarray) -> bytes:
    sizes = b"".join(n.to_bytes(4, "big") for n in values.shape)
    return gzip.compress(bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes())


def encoded(picture: np.ndarray, kind: str) -> bytes:
    raw = io.BytesIO()
    Image.fromarray(picture).save(raw, format=kind, lossless=True)
    return raw.getvalue()


def parquet_file(pictures: np.ndarray, labels: list[int], label: str, kind: str = "webp") -> bytes:
    cells = [{"bytes": encoded(picture, kind), "path": "a.png"} for picture in pictures]
    raw = io.BytesIO()
    parquet.write_table(pyarrow.table({"image": cells, label: labels, "other": labels}), raw, row_group_size=4)
    return raw.getvalue()
