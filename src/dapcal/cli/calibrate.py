"""`dapcal calibrate`: from your network, trained elsewhere, to a calibrated model in one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from dapcal.cli.common import MAX_SEED, Device, Json, Output, Quiet, Sign, check_key, output, too_few, typer, writable
from dapcal.records import ALPHA

if TYPE_CHECKING:
    from dapcal.models.network import NetworkModel


def calibrate(
    model: Annotated[
        str,
        typer.Option(
            help="package.module:factory, a function without arguments that returns the network; timm:name of a model "
            "of timm's, e.g. timm:resnet18,num_classes=10; or a Hugging Face folder of a text classifier."
        ),
    ],
    train: Annotated[
        Path,
        typer.Option(
            readable=False,
            help="What it was trained on: npz file of arrays x (N, ...) and y; of texts a table (.csv, .parquet).",
        ),
    ],
    held_out: Annotated[Path, typer.Option(readable=False, help="Like it, and never trained on.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", readable=False, help="File for the calibrated model, e.g. m.dap.")
    ],
    weights: Annotated[
        list[Path] | None,
        typer.Option(
            readable=False,
            help="Its weights: .safetensors, .pt or .pth; several make a deep ensemble. A folder has its own.",
        ),
    ] = None,
    text: Annotated[str | None, typer.Option(help="Texts: their column.")] = None,
    target: Annotated[str | None, typer.Option(help="Texts: the column of labels, by name or number.")] = None,
    ood: Annotated[
        Path | None, typer.Option(readable=False, help="Inputs unlike them, to choose φ on: npz file of x, or a table.")
    ] = None,
    posterior: Annotated[str | None, typer.Option(help="Of one network: last-layer (default) or laplace.")] = None,
    task: Annotated[
        str | None, typer.Option(help="classification, multi-label, counts or regression; guessed from y.")
    ] = None,
    classes: Annotated[str | None, typer.Option(help="Names of the classes or labels, e.g. cat,dog.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Of draws, and of the split of the held-out data.")
    ] = 0,
    sign: Sign = None,
    device: Device = "cpu",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make a network that you have trained know how far an input is from its training data.

    The factory is imported from the current folder or what is installed. Inputs are floating-point numbers as the
    network takes them (or int64 token ids); y holds classes from 0 as whole numbers, labels as zeros and ones (N, L),
    or targets as fractions. A Hugging Face folder holds config.json, model.safetensors and tokenizer.json; no code in
    it is run.

    Example: dapcal calibrate --model nets:make --weights w.safetensors --train train.npz --held-out val.npz -o m.dap
    """
    with output(as_json, quiet) as said:
        from dapcal.models.network import KEPT_BYTES
        from dapcal.models.text_folder import is_folder

        given = _Given(model, train, held_out, ood, posterior, task, classes, seed, device)
        writable(out, train, held_out, *(weights or ()), *([ood] if ood else []), *([sign] if sign else []))
        check_key(sign)
        fitted, count = (
            _of_texts(given, text, target, weights, said)
            if is_folder(model)
            else _of_arrays(given, text, target, weights, said)
        )
        if fitted.train is None:
            said.note(
                f"the training data take more than {KEPT_BYTES >> 20} MiB and are not kept with the model: "
                "dapcal report and dapcal explain cannot show them"
            )
        too_few(said, len(fitted.calibrated.evidence.held_out), ALPHA)
        fitted.save(out, sign)
        radius = {s.name: None if s.radius is None else s.radius.start for s in fitted.calibrated.distance.spaces}
        found: dict[str, Any] = {
            "file": str(out),
            "task": fitted.task,
            "classes": list(fitted.classes),
            "input_shape": list(fitted.input_shape),
            **fitted.quality,
            "nll_network": _nll_of_network(fitted),
            "phi": fitted.calibrated.phi,
            "radius": radius,
            "calibration": list(fitted.calibrated.notes),
        }
        said.result(found, f"{_numbers(fitted, count, len(weights or [model]), radius)}\n\nSaved to {out}")


class _Given(NamedTuple):
    """What both kinds of networks are given."""

    model: str
    train: Path
    held_out: Path
    ood: Path | None
    posterior: str | None
    task: str | None
    classes: str | None
    seed: int
    device: str


def _of_arrays(
    given: _Given, text: str | None, target: str | None, weights: list[Path] | None, said: Output
) -> tuple[NetworkModel, int]:
    """Of npz files; the model, and the number of training inputs."""
    from dapcal.models import arrays, network_fitting
    from dapcal.models.factories import moved, network, with_weights

    if text is not None or target is not None:
        raise ValueError(f"--text and --target are for a Hugging Face folder, and there is no folder {given.model}")
    if not weights:
        raise ValueError(f"Expected --weights, a file with the trained weights of {given.model}")
    made = network(given.model)
    networks = [moved(with_weights(made, path), given.device) for path in weights]
    dtype = next(made.parameters()).dtype
    data = arrays.labelled(given.train, dtype)
    fitted = network_fitting.fit(
        networks,
        data,
        arrays.labelled(given.held_out, dtype),
        ood=None if given.ood is None else arrays.unlabelled(given.ood, dtype),
        posterior=given.posterior,
        task=given.task,
        classes=() if given.classes is None else [name.strip() for name in given.classes.split(",")],
        factory=given.model,
        seed=given.seed,
        progress=said.progress,
    )
    if given.task is None:
        kinds = {"classification": "whole numbers", "multi-label": "zeros and ones", "regression": "fractions"}
        said.note(f"y holds {kinds[fitted.task]}, so this is {fitted.task}; --task says otherwise")
    return fitted, len(data.x)


def _of_texts(
    given: _Given, text: str | None, target: str | None, weights: list[Path] | None, said: Output
) -> tuple[NetworkModel, int]:
    """Of tables of texts; the model, and the number of training texts."""
    from dapcal.models import text_fitting

    for name, value in (("weights", weights), ("task", given.task), ("classes", given.classes)):
        if value:
            raise ValueError(f"A Hugging Face folder says its --{name} itself; leave the option out")
    if text is None or target is None:
        raise ValueError(
            "Expected --text and --target, the columns of texts and labels; e.g. --text text --target label"
        )
    texts = text_fitting.read(given.model, given.train, given.held_out, text=text, target=target, ood=given.ood)
    fitted = text_fitting.fit(
        texts, posterior=given.posterior, seed=given.seed, device=given.device, progress=said.progress
    )
    return fitted, len(texts.train.x)


def _numbers(fitted: NetworkModel, train: int, networks: int, radius: dict[str, float | None]) -> str:
    from dapcal.amounts import amount

    quality = fitted.quality
    measure = ("accuracy", f"{quality['accuracy']:.4f}") if fitted.classes else ("RMSE", amount(quality["rmse"]))
    before = [f"without distances: {quality['nll_before']:.4f}"]
    if (alone := _nll_of_network(fitted)) is not None:
        before.append(f"the network as it was: {alone:.4f}")
    noun = "labels" if fitted.task == "multi-label" else "classes"
    rows = [
        ("inputs", f"{train:,} in training, {quality['inputs']:,} held out for these numbers"),
        ("task", fitted.task + (f", {len(fitted.classes)} {noun}" if fitted.classes else "")),
        ("networks", f"an ensemble of {networks}" if networks > 1 else "one"),
        measure,
        ("NLL", f"{quality['nll_after']:.4f} ({', '.join(before)})"),
        ("phi", amount(fitted.calibrated.phi)),
        ("radius", ", ".join(f"{name} {'none' if r is None else amount(r, 3)}" for name, r in radius.items())),
    ]
    return "\n".join(f"{name:<10}{text}" for name, text in rows)


def _nll_of_network(fitted: NetworkModel) -> float | None:
    """Of the one network that was given, before anything was done to it; an ensemble has none."""
    network = fitted.calibrated.summary().network
    return None if network is None else network.nll
