"""`dapcal score`: an earlier name of `dapcal predict` for networks, with the options that concern them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dapcal.cli.common import Device, Factory, Json, Key, Quiet, typer
from dapcal.cli.predict import Alpha, BatchSize, ExcelSafe, Level, Mean, Resize, Std, predict
from dapcal.records import ALPHA, LEVEL


def score(
    file: Annotated[Path, typer.Argument(readable=False, help="What `dapcal calibrate` wrote.")],
    inputs: Annotated[
        Path, typer.Argument(readable=False, help="npz file with an array x (N, ...), or a folder of images.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", readable=False, help="Predictions: .csv, or .npz for arrays.")],
    factory: Factory = None,
    key: Key = None,
    alpha: Alpha = ALPHA,
    level: Level = LEVEL,
    batch_size: BatchSize = None,
    resize: Resize = False,
    mean: Mean = None,
    std: Std = None,
    excel_safe: ExcelSafe = False,
    device: Device = "cpu",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict every input of a network: the same as `dapcal predict`, which has taken its place.

    The file names its factory, but no code is run because a file names it: give --model again.

    Example: dapcal score m.dap new.npz --model nets:make -o scores.csv
    """
    predict(
        file,
        [inputs],
        out,
        factory=factory,
        key=key,
        alpha=alpha,
        level=level,
        batch_size=batch_size,
        resize=resize,
        mean=mean,
        std=std,
        excel_safe=excel_safe,
        device=device,
        as_json=as_json,
        quiet=quiet,
    )
