"""A network that you have trained yourself, made distance-aware: fitted, asked, saved and shown without further code.

networks ──► posterior (`posteriors.py`) ──► `dapcal.calibrate` ──► OwnModel ──► file

The file names the network's factory and never imports it: who loads the file gives the network again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dapcal import artifact
from dapcal.calibrate import Calibrated, calibrate
from dapcal.data import Labelled, check_inputs, gather, split
from dapcal.likelihoods import ClassLikelihood, Likelihood
from dapcal.own import arrays
from dapcal.own.images import Decoder, image_files
from dapcal.own.networks import moved
from dapcal.own.networks import network as made_by
from dapcal.own.posteriors import TASKS, guessed_task, likelihood_of, outputs_at, posterior_of
from dapcal.predictive import Prediction
from dapcal.progress import Stages

if TYPE_CHECKING:
    from dapcal.models.subject import Picture, Row, Subject

KIND = "model"
KEPT_HELD_OUT = 2000
KEPT_BYTES = 64 << 20  # of training data, and of held-out data
_BATCH = 256
_SHOWN = 16  # numbers of an input that is no image


def fit(
    networks: Sequence[nn.Module],
    train: Labelled,
    held_out: Labelled,
    *,
    ood: Tensor | None = None,
    posterior: str | None = None,
    task: str | None = None,
    classes: Sequence[str] = (),
    factory: str = "",
    seed: int = 0,
    progress: Stages | None = None,
) -> OwnModel:
    """Make trained networks distance-aware.

    In regression the noise level starts at the root mean square of the training residuals, and is refined on held-out
    data.

    Args:
        networks: one, or the members of a deep ensemble; all that follows runs on their device.
        train: what they were trained on.
        held_out: in-distribution data that they have not seen.
        ood: inputs away from the data, to choose φ on; by default held-out inputs that the model gets wrong.
        posterior: of one network, "last-layer" (default) or "laplace", of all its layers.
        task: "classification" or "regression"; by default whole numbers as targets are classes.
        classes: their names, in the order of the outputs; by default 0, 1, ….
        factory: the name that the networks were made by.
        seed: of draws, and of the split of the held-out data.
        progress: told (stage, done, total).
    """
    if not networks:
        raise ValueError("Expected one network or more, got none")
    networks = [copy.deepcopy(network).eval() for network in networks]
    progress = progress or (lambda *_: None)
    device = next(networks[0].parameters()).device
    train, held_out = gather(_on(train, device)[:2], "train"), gather(_on(held_out, device)[:2], "held_out")
    one = outputs_at(networks[0], train.x[:2])[:1]
    check_inputs(held_out.x, "held_out", like=train.x)
    task = task or guessed_task(train.y)
    if task == "regression":
        train, held_out = (Labelled(data.x, data.y.to(one.dtype)) for data in (train, held_out))
    likelihood = likelihood_of(networks, train, task)
    names = _class_names(classes, likelihood, one.shape[1])
    train, held_out = (
        Labelled(data.x, likelihood.check(one.expand(len(data.x), -1), data.y)) for data in (train, held_out)
    )
    chooses, unseen = (
        held_out.subset(half.to(device)) for half in split(len(held_out.x), torch.Generator().manual_seed(seed))
    )
    base = posterior_of(networks, likelihood, train, chooses, posterior, seed, progress)
    progress("calibrating", 0, 1)
    calibrated = calibrate(
        base,
        train=(train.x, train.y),
        held_out=(held_out.x, held_out.y),
        ood=None if ood is None else ood.to(device),
        temperature=task == "regression",
        seed=seed,
    )
    progress("calibrating", 1, 1)
    quality = _quality(calibrated, unseen, progress)
    kept = train if _bytes(train) <= KEPT_BYTES else None
    return OwnModel(calibrated, _sampled(held_out, seed), kept, factory, names, quality)


def load(path: str | Path, network: nn.Module | str | None, device: str = "cpu") -> OwnModel:
    """Read what `OwnModel.save` wrote.

    Args:
        path: the file.
        network: one that the factory makes, whose weights do not matter, or the factory's name; the one in the file is
            not heeded, as importing code that a file names would let the file choose what runs.
        device: where predictions run.
    """
    stored = artifact.open(path)
    about, further = stored.about, stored.attachments
    if about.get("kind") != KIND:
        other = "a table's model; use dapcal predict" if about.get("kind") == "table" else None
        raise ValueError(f"{path} holds {other or 'nothing that dapcal calibrate wrote; load it with dapcal.load'}")
    if network is None:
        raise ValueError(f"{path} holds no code: give its model, as when it was made, by --model {about['factory']!r}")
    made = made_by(network) if isinstance(network, str) else network
    calibrated = stored.calibrated(moved(made, device))
    sets = {
        name: _on(Labelled(further[f"{name}.x"], further[f"{name}.y"]), calibrated.example.device)
        for name in ("held_out", "train")
        if f"{name}.x" in further
    }
    return OwnModel(
        calibrated, sets["held_out"], sets.get("train"), about["factory"], tuple(about["classes"]), about["quality"]
    )


@dataclass(frozen=True, eq=False)
class OwnModel:
    """A calibrated network of a user's own.

    Attributes:
        calibrated: the calibrated posterior.
        held_out: held-out data, at most `KEPT_HELD_OUT` inputs and `KEPT_BYTES`.
        train: training data, None where they take more than `KEPT_BYTES`.
        factory: the name that the network was made by, package.module:factory.
        classes: their names; empty in regression.
        quality: on held-out data that nothing was chosen on: accuracy or rmse, nll_before and nll_after the adjustment.
    """

    calibrated: Calibrated
    held_out: Labelled
    train: Labelled | None = None
    factory: str = ""
    classes: tuple[str, ...] = ()
    quality: dict[str, float] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write everything but the network's code to one file, complete or not at all."""
        about = {
            "kind": KIND,
            "factory": self.factory,
            "task": self.task,
            "classes": list(self.classes),
            "input_shape": list(self.input_shape),
            "quality": self.quality,
        }
        further = {"held_out.x": self.held_out.x, "held_out.y": self.held_out.y}
        if self.train is not None:
            further |= {"train.x": self.train.x, "train.y": self.train.y}
        artifact.save(self.calibrated, path, about, further)

    @property
    def task(self) -> str:
        """One of `TASKS`."""
        return TASKS[0] if isinstance(self.calibrated.posterior.likelihood, ClassLikelihood) else TASKS[1]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one input."""
        return tuple(self.calibrated.example.shape[1:])

    def predict(self, x: Tensor) -> Prediction:
        """Predictions at inputs (N, ...), which take the network's device, and its precision where they have one."""
        example = self.calibrated.example
        return self.calibrated(x.to(example) if x.is_floating_point() else x.to(example.device))

    def batches(self, path: str | Path, rows: int) -> Iterator[Tensor]:
        """Inputs `x` of an npz file, a few at a time: shape and precision as the network wants them."""
        found, example = arrays.array(path, "x"), self.calibrated.example
        if found.shape[1:] != self.input_shape:
            raise ValueError(
                f"{path}: Expected inputs of shape {self.input_shape}, as in training, got {found.shape[1:]}"
            )
        dtype = example.dtype if example.is_floating_point() else torch.get_default_dtype()
        done = 0
        for values in found.batches(rows):
            yield arrays.as_inputs(values, dtype, str(path), done)
            done += len(values)

    def inputs(self, path: Path, most: int) -> Tensor:
        """The first inputs of an npz file, or of a folder of images with pixels from 0 to 1."""
        if not path.is_dir():
            return next(self.batches(path, most)).to(self.calibrated.example.device)
        if self.shades != (0.0, 1.0):
            raise ValueError(f"{path} is a folder, and the model's inputs are no pixels from 0 to 1; give an npz file")
        return next(Decoder(self.input_shape).batches(image_files(path)[:most], most)).to(self.calibrated.example)

    def subject(
        self, title: str, new: Tensor | None = None, new_name: str = "new data", train: Labelled | None = None
    ) -> Subject:
        """What a report is about.

        Args:
            title: of the page.
            new: further inputs to report on.
            new_name: what those are called.
            train: the training data of the calibration, where the file has not kept them.
        """
        from dapcal.models.subject import Axis, Subject

        train = self.train if train is None else train
        if train is None:
            raise ValueError(
                f"The training data take more than {KEPT_BYTES >> 20} MiB and were not kept with the model, so that "
                "nothing can be shown beside them; calibrate with fewer, or give them again in Python (`train`)"
            )
        features = tuple(f"x{i}" for i in range(self.input_shape[0])) if len(self.input_shape) == 1 else ()
        return Subject(
            calibrated=self.calibrated,
            train=_on(train, self.calibrated.example.device),
            held_out=self.held_out,
            title=title,
            target="class" if self.classes else "target",
            show=self.show,
            classes=self.classes,
            features=features,
            axes=(Axis("x0"), Axis("x1")) if len(features) == 2 else None,
            new=new,
            new_name=new_name,
        )

    def show(self, x: Tensor) -> list[Row | Picture]:
        """Inputs (N, ...) as a person sees them: images of one or three channels as pictures, else numbers by name."""
        from dapcal.models.subject import Picture
        from dapcal.png import image_png

        if len(self.input_shape) == 3 and self.input_shape[0] in (1, 3) and x.is_floating_point():
            low, high = self.shades
            return [Picture(image_png(image, low, high)) for image in x]
        return [{f"x{i}": f"{value:.4g}" for i, value in enumerate(row[:_SHOWN].tolist())} for row in x.flatten(1)]

    @property
    def shades(self) -> tuple[float, float]:
        """Black and white: 0 and 1, or where held-out inputs go beyond these, their smallest and largest value."""
        low, high = float(self.held_out.x.min()), float(self.held_out.x.max())
        return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def _on(data: Labelled, device: torch.device) -> Labelled:
    return Labelled(data.x.to(device), data.y.to(device))


def _class_names(classes: Sequence[str], likelihood: Likelihood, outputs: int) -> tuple[str, ...]:
    if not isinstance(likelihood, ClassLikelihood):
        if classes:
            raise ValueError(f"Expected no `classes` in regression, got {len(classes)} names; leave them out")
        return ()
    count = max(outputs, 2)  # one logit is of two classes
    names = tuple(classes) or tuple(str(number) for number in range(count))
    if len(names) != count or len(set(names)) != count or not all(names):
        raise ValueError(f"Expected {count} different `classes` (the model's outputs), got {', '.join(names)}")
    return names


def _quality(calibrated: Calibrated, data: Labelled, progress: Stages) -> dict[str, float]:
    """Accuracy or root mean square error, and negative log-likelihoods before and after the adjustment."""
    classes = isinstance(calibrated.posterior.likelihood, ClassLikelihood)
    sums = torch.zeros(3, dtype=torch.float64)
    for start in range(0, len(data.x), _BATCH):
        x, y = data.x[start : start + _BATCH], data.y[start : start + _BATCH]
        prediction = calibrated(x)
        mean = prediction.mean
        good = (mean.argmax(-1) == y).double() if classes else (mean - y).double().square().mean(-1)
        parts = (good, -prediction.base.log_prob(y), -prediction.log_prob(y))
        sums += torch.stack([part.double().sum().cpu() for part in parts])
        progress("measuring", start + len(x), len(data.x))
    first, before, after = (sums / len(data.x)).tolist()
    measured = {"accuracy": first} if classes else {"rmse": first**0.5}
    return {**measured, "nll_before": before, "nll_after": after, "inputs": len(data.x)}


def _sampled(data: Labelled, seed: int) -> Labelled:
    """As many inputs as a file keeps; all, in order, where that is possible."""
    most = max(1, min(KEPT_HELD_OUT, KEPT_BYTES * len(data.x) // _bytes(data)))
    if len(data.x) <= most:
        return data
    rows = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(seed))[:most].sort().values
    return data.subset(rows.to(data.x.device))


def _bytes(data: Labelled) -> int:
    return sum(part.numel() * part.element_size() for part in (data.x, data.y))
