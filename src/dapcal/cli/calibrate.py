"""`dapcal calibrate`: from your network, trained elsewhere, to a calibrated model in one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dapcal.cli.common import MAX_SEED, Device, Json, Quiet, Sign, check_key, output, too_few, typer, writable
from dapcal.records import ALPHA

if TYPE_CHECKING:
    from dapcal.models.network import NetworkModel


def calibrate(
    model: Annotated[
        str, typer.Option(help="package.module:factory, a function without arguments that returns the network.")
    ],
    weights: Annotated[
        list[Path],
        typer.Option(readable=False, help="Its weights: .safetensors, .pt or .pth; several make a deep ensemble."),
    ],
    train: Annotated[
        Path, typer.Option(readable=False, help="What it was trained on: npz file of arrays x (N, ...) and y.")
    ],
    held_out: Annotated[
        Path, typer.Option(readable=False, help="Like it, and never trained on: npz file of arrays x and y.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", readable=False, help="File for the calibrated model, e.g. m.dap.")
    ],
    ood: Annotated[
        Path | None, typer.Option(readable=False, help="Inputs unlike them, to choose φ on: npz file of x.")
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
    or targets as fractions.

    Example: dapcal calibrate --model nets:make --weights w.safetensors --train train.npz --held-out val.npz -o m.dap
    """
    with output(as_json, quiet) as said:
        from dapcal.models import arrays, network_fitting
        from dapcal.models.factories import moved, network, with_weights
        from dapcal.models.network import KEPT_BYTES

        writable(out, train, held_out, *weights, *([ood] if ood else []), *([sign] if sign else []))
        check_key(sign)
        made = network(model)
        networks = [moved(with_weights(made, path), device) for path in weights]
        dtype = next(made.parameters()).dtype
        data = arrays.labelled(train, dtype)
        fitted = network_fitting.fit(
            networks,
            data,
            arrays.labelled(held_out, dtype),
            ood=None if ood is None else arrays.unlabelled(ood, dtype),
            posterior=posterior,
            task=task,
            classes=() if classes is None else [name.strip() for name in classes.split(",")],
            factory=model,
            seed=seed,
            progress=said.progress,
        )
        if task is None:
            kinds = {"classification": "whole numbers", "multi-label": "zeros and ones", "regression": "fractions"}
            said.note(f"y holds {kinds[fitted.task]}, so this is {fitted.task}; --task says otherwise")
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
        said.result(found, f"{_numbers(fitted, len(data.x), len(networks), radius)}\n\nSaved to {out}")


def _numbers(fitted: NetworkModel, train: int, networks: int, radius: dict[str, float | None]) -> str:
    quality = fitted.quality
    measure = ("accuracy", f"{quality['accuracy']:.4f}") if fitted.classes else ("RMSE", f"{quality['rmse']:.4g}")
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
        ("phi", f"{fitted.calibrated.phi:.4g}"),
        ("radius", ", ".join(f"{name} {'none' if r is None else f'{r:.3g}'}" for name, r in radius.items())),
    ]
    return "\n".join(f"{name:<10}{text}" for name, text in rows)


def _nll_of_network(fitted: NetworkModel) -> float | None:
    """Of the one network that was given, before anything was done to it; an ensemble has none."""
    network = fitted.calibrated.summary().network
    return None if network is None else network.nll
