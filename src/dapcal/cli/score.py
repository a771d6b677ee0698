"""`dapcal score`: predictions of a network of one's own for arrays or images, in batches, whatever their number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from dapcal.cli.common import Device, Json, Output, Quiet, all_written, output, too_few, typer, writable
from dapcal.types import ALPHA, LEVEL

if TYPE_CHECKING:
    from torch import Tensor

    from dapcal.own.model import OwnModel


def score(
    file: Annotated[Path, typer.Argument(readable=False, help="What `dapcal calibrate` wrote.")],
    inputs: Annotated[
        Path, typer.Argument(readable=False, help="npz file with an array x (N, ...), or a folder of images.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", readable=False, help="Scores: .csv, or .npz for arrays.")],
    model: Annotated[str | None, typer.Option(help="package.module:factory, as in `calibrate`.")] = None,
    alpha: Annotated[float, typer.Option(min=0, max=1, help="Inputs with a p-value up to this are flagged.")] = ALPHA,
    level: Annotated[float, typer.Option(help="Probability that an interval holds the target (regression).")] = LEVEL,
    batch_size: Annotated[int, typer.Option(min=1, help="Inputs at a time.")] = 256,
    resize: Annotated[bool, typer.Option("--resize", help="Resize images of another size.")] = False,
    mean: Annotated[str | None, typer.Option(help="Of pixels from 0 to 1 in training, e.g. 0.485,0.456,0.406.")] = None,
    std: Annotated[str | None, typer.Option(help="Likewise, e.g. 0.229,0.224,0.225.")] = None,
    device: Device = "cpu",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict every input: class or number, uncertainty, and whether it is like the training inputs.

    Images become numbers from 0 to 1 in the channels of the network, minus --mean, over --std. The file names its
    factory, but no code is run because a file names it: give --model again.

    Example: dapcal score m.dap new.npz --model nets:make -o scores.csv
    """
    with output(as_json, quiet) as said:
        import numpy as np

        from dapcal.own import model as own_models
        from dapcal.own.scores import SUFFIXES, columns_of, writer

        writable(out, file, *([] if inputs.is_dir() else [inputs]))
        if out.suffix.lower() not in SUFFIXES:
            raise ValueError(f"Expected --out as a {' or '.join(SUFFIXES)} file, got {out}")
        if not 0 < level < 1:
            raise ValueError(f"Expected --level between 0 and 1, got {level}")
        own = own_models.load(file, model, device)
        too_few(said, len(own.calibrated.evidence.held_out), alpha)
        if inputs.is_dir():
            source = _images(own, inputs, batch_size, resize, mean, std, said)
        elif resize or mean is not None or std is not None:
            raise ValueError(
                f"--resize, --mean and --std are for folders of images, and {inputs} is none; leave them out"
            )
        else:
            source = _arrays(own, inputs, batch_size)
        done, flagged = 0, 0
        with writer(out, own.classes) as write:
            for x in source.batches:
                columns = columns_of(own.predict(x), own.classes, level, alpha)
                write({source.column: np.asarray(source.names[done : done + len(x)]), **columns})
                done, flagged = done + len(x), flagged + int(columns["ood"].sum())
                said.progress("scoring", done, len(source.names))
            all_written(len(source.names), done, inputs)
        share = f"{flagged:,} of {done:,} inputs ({100 * flagged / done:.1f} %) are out of distribution at {alpha:g}"
        said.result({"file": str(out), "inputs": done, "ood": flagged, "alpha": alpha}, f"{share}\nSaved to {out}")


class _Source(NamedTuple):
    """Inputs and what they are called."""

    column: str
    names: Sequence[Any]
    batches: Iterator[Tensor]


def _arrays(own: OwnModel, path: Path, size: int) -> _Source:
    from dapcal.own.arrays import array

    return _Source("index", range(array(path, "x").shape[0]), own.batches(path, size))


def _images(
    own: OwnModel, folder: Path, size: int, resize: bool, mean: str | None, std: str | None, said: Output
) -> _Source:
    from dapcal.own.images import Decoder, image_files

    if mean is None and std is None and own.shades != (0.0, 1.0):
        low, high = own.shades
        said.note(
            f"pixels are read as 0 to 1, but held-out inputs went from {low:.3g} to {high:.3g}; see --mean, --std"
        )
    decode = Decoder(own.input_shape, _numbers(mean, "mean", 0.0), _numbers(std, "std", 1.0), resize)
    files = image_files(folder)
    return _Source("file", [path.relative_to(folder).as_posix() for path in files], decode.batches(files, size))


def _numbers(text: str | None, option: str, default: float) -> tuple[float, ...]:
    if text is None:
        return (default,)
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"Expected --{option} as numbers like 0.5,0.5,0.5, got {text!r}") from None
