"""Images as uint8 tensors, and what turns them into inputs of a network."""

from __future__ import annotations

import gzip
import io
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from dapcal.experiments.datasets.decoded import Arrays, decoded

_RESIZED_AT_ONCE = 1024  # images; bounds the memory of their float copies


class Images(NamedTuple):
    """Images and their labels."""

    x: Tensor  # uint8 (N, C, H, W)
    y: Tensor  # int64 (N,)


def mnist(split: str) -> Images:
    """Handwritten digits, 28×28 grey: "train" (60,000) or "test" (10,000) (LeCun et al., 1998)."""
    return _idx("mnist", split)


def fashion_mnist(split: str) -> Images:
    """Clothes in MNIST's format: "train" (60,000) or "test" (10,000) (Xiao et al., 2017, arXiv:1708.07747)."""
    return _idx("fashion_mnist", split)


def cifar10(split: str) -> Images:
    """Small photographs, 32×32 in colour, ten classes: "train" (50,000) or "test" (10,000) (Krizhevsky, 2009)."""
    return _parquet("cifar10", split, ("train", "test"), "label")


def cifar100(split: str) -> Images:
    """The same with a hundred (fine) classes, none of them CIFAR-10's: "test" (10,000) (Krizhevsky, 2009)."""
    return _parquet("cifar100", split, ("test",), "fine_label")


def svhn(split: str) -> Images:
    """House numbers, 32×32 in colour, cropped to one digit: "test" (26,032) (Netzer et al., 2011).

    Cropped anew from the whole numbers; its statistics are those of the published crops, bit by bit it is not proven.
    """
    return _parquet("svhn", split, ("test",), "label")


def omniglot(split: str) -> Images:
    """Characters of twenty alphabets, 105×105, black ink on white: "evaluation" (13,180) (Lake et al., 2015).

    A label is the place of the character's folder among all, sorted by alphabet and character.
    """
    _check_split("omniglot", split, ("evaluation",))
    return _tensors(decoded("omniglot-evaluation", ("omniglot/images_evaluation.zip",), _from_zip))


def as_floats(images: Images | Tensor) -> Tensor:
    """Pixels between 0 and 1, float32 (N, C, H, W)."""
    return _pixels(images).float() / 255


def like_mnist(images: Images | Tensor, invert: bool = False) -> Tensor:
    """Images as MNIST has them: grey, 28×28, between 0 and 1, float32 (N, 1, 28, 28).

    Colours are weighted as in ITU-R 601 and rounded, exactly as by Pillow; sizes change by bilinear interpolation with
    antialiasing.

    Args:
        images: uint8 (N, 1 or 3, H, W).
        invert: bright becomes dark; for Omniglot, so that ink is bright.
    """
    parts = []
    for x in _pixels(images).split(_RESIZED_AT_ONCE):
        grey = as_floats(_grey(x))
        if grey.shape[2:] != (28, 28):
            grey = interpolate(grey, size=(28, 28), mode="bilinear", align_corners=False, antialias=True).clamp(0, 1)
        parts.append(1 - grey if invert else grey)
    return torch.cat(parts)


def _grey(x: Tensor) -> Tensor:
    """(N, 3, H, W) -> (N, 1, H, W), in the whole numbers that Pillow calculates with."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.int().unbind(1)
    return ((19595 * red + 38470 * green + 7471 * blue + 2**15) >> 16).to(torch.uint8)[:, None]


def _pixels(images: Images | Tensor) -> Tensor:
    x = images.x if isinstance(images, Images) else images
    if x.dtype != torch.uint8 or x.ndim != 4 or x.shape[1] not in (1, 3):
        raise ValueError(
            f"Expected `images` as uint8 (N, 1 or 3, H, W), got {x.dtype} {tuple(x.shape)}; pass them as loaded"
        )
    return x


def _check_split(name: str, split: str, known: tuple[str, ...]) -> None:
    if split not in known:
        raise ValueError(f"Expected `split` of {name} as {' or '.join(map(repr, known))}, got {split!r}")


def _tensors(arrays: Arrays) -> Images:
    return Images(torch.from_numpy(arrays.x), torch.from_numpy(arrays.y))


def _idx(name: str, split: str) -> Images:
    _check_split(name, split, ("train", "test"))
    part = {"train": "train", "test": "t10k"}[split]
    files = (f"{name}/{part}-images-idx3-ubyte.gz", f"{name}/{part}-labels-idx1-ubyte.gz")
    return _tensors(decoded(f"{name}-{split}", files, _from_idx))


def _from_idx(images: Path, labels: Path) -> Arrays:
    return Arrays(_idx_array(images)[:, None], _idx_array(labels).astype(np.int64))


def _idx_array(path: Path) -> np.ndarray:
    """IDX: two zero bytes, the type (8: uint8), the number of dimensions, their sizes (big-endian), the values."""
    raw = gzip.decompress(path.read_bytes())
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"Expected an IDX file of bytes at {path}, got one that starts with {raw[:4]!r}")
    sizes = np.frombuffer(raw, ">i4", raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(sizes).copy()


def _parquet(name: str, split: str, known: tuple[str, ...], label: str) -> Images:
    _check_split(name, split, known)
    return _tensors(decoded(f"{name}-{split}", (f"{name}/{split}.parquet",), partial(_from_parquet, label)))


def _from_parquet(label: str, path: Path) -> Arrays:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ImportError("Parquet files need pyarrow; install it with: pip install 'dapcal[experiments]'") from error
    opened, parts, labels = _pillow(), [], []
    with ParquetFile(path) as file:
        for batch in file.iter_batches(columns=["image.bytes", label]):
            raw = batch["image"].field("bytes")
            pictures = [np.asarray(opened(io.BytesIO(one.as_py())).convert("RGB")) for one in raw]
            parts.append(np.stack(pictures).transpose(0, 3, 1, 2))
            labels.append(batch[label].to_numpy().astype(np.int64))
    return Arrays(np.ascontiguousarray(np.concatenate(parts)), np.concatenate(labels))


def _from_zip(path: Path) -> Arrays:
    opened = _pillow()
    with zipfile.ZipFile(path) as archive:
        names = sorted(n for n in archive.namelist() if n.endswith(".png") and not n.startswith("__MACOSX"))
        pictures = [np.asarray(opened(io.BytesIO(archive.read(name))).convert("L")) for name in names]
    folders = [name.rpartition("/")[0] for name in names]
    _, labels = np.unique(folders, return_inverse=True)
    return Arrays(np.stack(pictures)[:, None], labels.astype(np.int64))


def _pillow() -> Callable[..., Any]:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("Images need pillow; install it with: pip install 'dapcal[experiments]'") from error
    return Image.open
