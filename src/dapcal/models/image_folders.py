"""Folders of image files as a network's inputs: pixels are numbers from 0 to 1, (C, H, W)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF")  # pillow knows forty more, whatever a file's name says
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # of pillow, by the number of channels


def image_files(folder: str | Path) -> list[Path]:
    """All images in a folder and the folders inside it, by name; hidden files are not images."""
    folder = Path(folder)
    files = [path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()]
    found = sorted(path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    if not found:
        raise ValueError(f"There are no images in {folder}; expected files that end with {', '.join(SUFFIXES)}")
    return found


@dataclass(frozen=True)
class Decoder:
    """Reads images as a network takes them: grey or RGB, in its size, (value / 255 − mean) / std.

    Args:
        shape: (C, H, W) of the network's inputs.
        mean: that pixels were normalised with in training, one number or one a channel.
        std: likewise.
        resize: whether images of another size are resized (bilinear); else they are refused.
    """

    shape: tuple[int, ...]
    mean: Sequence[float] = (0.0,)
    std: Sequence[float] = (1.0,)
    resize: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or self.shape[0] not in _MODES:
            raise ValueError(
                f"Expected a model of images (C, H, W) with 1, 3 or 4 channels, but its inputs are {self.shape}; give "
                "an npz file"
            )
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.shape[0]):
                raise ValueError(f"Expected `{name}` as 1 or {self.shape[0]} numbers (channels), got {len(values)}")
        if not all(value > 0 for value in self.std):
            raise ValueError(f"Expected `std` above 0, got {', '.join(map(str, self.std))}")

    def __call__(self, path: Path) -> Tensor:
        """One image, (C, H, W) in float32."""
        channels, height, width = self.shape
        pixels = torch.from_numpy(_pixels(path, _MODES[channels], (width, height), self.resize))
        values = pixels.reshape(height, width, channels).permute(2, 0, 1).float() / 255
        mean, std = (torch.tensor(part, dtype=torch.float32)[:, None, None] for part in (self.mean, self.std))
        return (values - mean) / std

    def batches(self, files: Sequence[Path], size: int) -> Iterator[Tensor]:
        """The images of all files, `size` at a time."""
        for start in range(0, len(files), size):
            yield torch.stack([self(path) for path in files[start : start + size]])


@contextmanager
def _bombs_refused(warning: type[Warning]) -> Iterator[None]:
    """What pillow warns of, images of more than 89 million pixels, is an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", warning)
        yield


def _pixels(path: Path, mode: str, size: tuple[int, int], resize: bool) -> np.ndarray:
    """An image of that mode and (width, height), as bytes."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("Images need pillow; install it with: pip install 'dapcal[images]'") from error
    try:
        with _bombs_refused(Image.DecompressionBombWarning), Image.open(path, formats=_FORMATS) as image:
            deep, found = image.mode[:1] in "IF", image.size
            if not deep and (resize or found == size):
                converted = image.convert(mode)
                return np.array(converted if found == size else converted.resize(size, Image.Resampling.BILINEAR))
    except Exception as error:  # every decoder has errors of its own
        raise ValueError(f"{path} is damaged or no image ({error}); save it again, or take it out") from error
    if deep:
        raise ValueError(
            f"{path} has more than 8 bits a channel; give such images as an npz file, scaled as in training"
        )
    raise ValueError(
        f"{path} has {found[0]} × {found[1]} pixels (width × height), the model takes {size[0]} × {size[1]}; give "
        "images of that size, or --resize"
    )
