"""Which networks work: every kind of `network_kinds` fitted, calibrated, predicted with, saved, loaded and exported.

A cell is "works", or the sentence that a step is refused with; an error that is not one of dapcal's sentences is marked
as such. What was saved is loaded in a new process, where predictions must be the same; so must those of the exported
program. Written: results/networks.json, of which `python -m dapcal.experiments.page.networks` makes docs/networks.md.

Run: python benchmarks/networks.py [--out result.json] [--only part-of-a-name]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from network_kinds import KINDS, Kind, loader
from torch import nn

import dapcal
from dapcal import deploy
from dapcal.distances.projectors import Features
from dapcal.experiments.records import environment
from dapcal.files import write_text
from dapcal.likelihoods import Categorical
from dapcal.posteriors import swag

STEPS = ("fit a posterior", "calibrate", "predict from a loader", "save", "load in a new process", "export")
WORKS = "works"
RAW = "NOT A SENTENCE OF DAPCAL'S: "


def main() -> None:
    asked = argparse.ArgumentParser(description="Which networks work")
    asked.add_argument("--out", type=Path)
    asked.add_argument("--only", default="")
    asked.add_argument("--load", type=Path, help="(of this script's own) load what is in a folder")
    options = asked.parse_args()
    warnings.simplefilter("ignore")
    if options.load is not None:
        print(json.dumps(loaded(options.load)))
        return
    rows = table([name for name in KINDS if options.only in name])
    for name, row in rows.items():
        print(f"{name}: features {row['features']}")
        for step, found in row["steps"].items():
            print(f"    {step:22} {found}")
    if options.out is not None:
        result = {"experiment": "networks", "environment": environment("cpu"), "steps": STEPS, "rows": rows}
        write_text(options.out, json.dumps(result, indent=1) + "\n")


def table(names: list[str]) -> dict[str, Any]:
    """A row for every kind."""
    with tempfile.TemporaryDirectory() as folder:
        rows = {name: row(KINDS[name], Path(folder) / f"{number}.dap") for number, name in enumerate(names)}
        places = {name: f"{number}.dap" for number, name in enumerate(names) if "probs" in rows[name]}
        (Path(folder) / "places.json").write_text(json.dumps(places))
        command = [sys.executable, __file__, "--load", folder]
        environ = {**os.environ, "PYTHONHASHSEED": "1"}
        told = subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout
        again = json.loads(told.splitlines()[-1])
    for name, found in rows.items():
        probs = found.pop("probs", None)
        steps = found["steps"]
        steps["load in a new process"] = "–" if probs is None else again[name]["step"]
        if probs is not None and again[name]["step"] == WORKS and not close(probs, again[name]["probs"]):
            steps["load in a new process"] = f"{RAW}other predictions than before"
        found["steps"] = {step: steps.get(step, "–") for step in STEPS}
    return rows


def row(kind: Kind, place: Path) -> dict[str, Any]:
    """What becomes of one kind; probabilities of one batch where it could be saved."""
    train, held_out = loader(kind, 48, 0), loader(kind, 32, 1)
    (x, _), found = first(held_out), {"features": "–", "steps": {}}
    steps = found["steps"]
    network = kind.wrap(seeded(kind))

    steps["fit a posterior"], _ = tried(
        lambda: swag.fit(network, Categorical(), train, epochs=2, start=0.0, rank=2, draws=3).outputs
    )
    steps["calibrate"], calibrated = tried(
        lambda: dapcal.calibrate(network, Categorical(), train=train, held_out=held_out, candidates=8)
    )
    if calibrated is None:
        return found
    found["features"] = Features().fit_projector(calibrated.example, calibrated.posterior).layer
    steps["predict from a loader"], prediction = tried(lambda: calibrated.predict(held_out))
    steps["save"], _ = tried(lambda: calibrated.save(place))
    alone = calibrated(x)
    if prediction is not None and not close(alone.probs.tolist(), prediction.probs[: len(alone)].tolist()):
        steps["predict from a loader"] = f"{RAW}other predictions in other batches"
    steps["export"], program = tried(lambda: deploy.export(calibrated))
    if program is not None:
        given = x if calibrated.inputs is None else calibrated.inputs.unpack(packed_like_example(calibrated, x))
        steps["export"], told = tried(lambda: program.module()(given))
        if told is not None and not close(told["mean"].tolist(), alone.probs.tolist()):
            steps["export"] = f"{RAW}other predictions than before"
    if steps["save"] == WORKS:
        found["probs"] = alone.probs.tolist()
    return found


def loaded(folder: Path) -> dict[str, Any]:
    """In a new process: predictions of what was saved, with a network of other weights."""
    found = {}
    for name, place in json.loads((folder / "places.json").read_text()).items():
        kind = KINDS[name]
        torch.manual_seed(7)
        step, calibrated = tried(lambda kind=kind, place=place: dapcal.load(folder / place, kind.make()))
        found[name] = {"step": step}
        if calibrated is not None:
            found[name]["probs"] = calibrated(first(loader(kind, 32, 1))[0]).probs.tolist()
    return found


def tried(step: Callable[[], Any]) -> tuple[str, Any]:
    """What a step gives, or the sentence it is refused with."""
    try:
        return WORKS, step()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1].filename
        ours = Path(dapcal.__file__).parent in Path(where).parents
        return f"{'' if ours else f'{RAW}{type(error).__name__}: '}{' '.join(str(error).split())}", None


def first(batches: Any) -> tuple[Any, Any]:
    """Inputs and targets of the first batch."""
    batch = next(iter(batches))
    if isinstance(batch, dict):
        return {name: part for name, part in batch.items() if name != "labels"}, batch["labels"]
    return batch[0], batch[1]


def packed_like_example(calibrated: Any, x: Any) -> torch.Tensor:
    """Inputs packed and padded to the length that the program was made for."""
    fields = calibrated.inputs
    parts = x if isinstance(x, dict) else dict(zip(fields.names, x, strict=True))
    return fields.pack(parts, "x", fields.length(calibrated.example))


def seeded(kind: Kind) -> nn.Module:
    torch.manual_seed(0)
    return kind.make()


def close(one: list[list[float]], two: list[list[float]]) -> bool:
    return bool(torch.allclose(torch.tensor(one), torch.tensor(two), atol=1e-5))


if __name__ == "__main__":
    main()
