"""What happens at the end of training, whoever trained: calibrate, then write the artefact and the report."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dapcal.calibrate import calibrate
from dapcal.data import Data
from dapcal.files import replaceable
from dapcal.likelihoods import Likelihood
from dapcal.models.network import NetworkModel, on_device
from dapcal.models.network_fitting import model_of
from dapcal.models.subject import Picture, Row
from dapcal.networks import take
from dapcal.report import write
from dapcal.types import DapcalWarning

Seen = Callable[[Mapping[str, Tensor]], list[Row | Picture]]


@dataclass(frozen=True, eq=False)
class Ending:
    """The options that all callbacks share, and what they do with a trained network.

    Attributes:
        path: of the artefact, e.g. "digits.dap".
        likelihood: p(y | outputs); by default as in `dapcal.calibrate`.
        held_out: in-distribution data that training did not see; by default a part of the validation data.
        share: that part. The rest, which the calibration has not seen, is left for measuring what it gives.
        train: what the network was trained on; by default the rows of the training loader's data set.
        report: where the HTML page goes; True: beside the artefact, False: nowhere.
        classes: their names, in the order of the outputs; by default 0, 1, ….
        seed: of the part, of draws, and of the split of the held-out data.
        options: further arguments of `dapcal.calibrate`, e.g. {"ood": images}.
    """

    path: Path
    likelihood: Likelihood | None = None
    held_out: Data | None = None
    share: float = 0.5
    train: Data | None = None
    report: bool | str | Path = True
    classes: Sequence[str] = ()
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"Expected `share` above 0 and up to 1, got {self.share}")
        if taken := sorted({"train", "held_out", "likelihood", "seed"} & set(self.options)):
            raise ValueError(f"Expected {', '.join(taken)} as arguments of the callback, not in `options`")

    @property
    def page(self) -> Path | None:
        """Where the report goes."""
        if isinstance(self.report, bool):
            return self.path.with_suffix(".html") if self.report else None
        return Path(self.report)

    def check_places(self) -> None:
        """Refuse files that cannot be written before hours of training."""
        for place in (self.path, self.page):
            if place is not None:
                replaceable(place)
        if self.page == self.path:
            raise ValueError(f"Expected artefact and report in two files, got {self.path} for both")

    def __call__(
        self, network: nn.Module, train: Data | None, validation: Data | None, seen: Seen | None = None
    ) -> NetworkModel:
        """The calibrated model, after both files are written.

        Args:
            network: trained.
            train: what the trainer has as training data.
            validation: and as validation data.
            seen: from inputs by name to what a person sees of them in the report, where numbers say little.
        """
        taken = take(network, {"train": self._train(train), "held_out": self._held_out(validation)})
        device = next(taken.subject.parameters()).device
        known, held_out = (on_device(taken.data[name], device) for name in ("train", "held_out"))
        if self.held_out is None:
            held_out = held_out.subset(self.rows(len(held_out.y)).to(device))
        calibrated = calibrate(
            taken.subject, self.likelihood, train=known, held_out=held_out, seed=self.seed, **self.options
        )
        model = model_of(calibrated, known, held_out, classes=self.classes, seed=self.seed)
        model.save(self.path)
        if self.page is not None:
            subject, fields = model.subject(self.path.name, train=known), taken.fields
            if seen is not None and fields is not None:
                subject = replace(subject, show=lambda x: seen(fields.unpack(x)))
            write(subject, self.page)
        return model

    def with_classes(self, names: Sequence[str]) -> Ending:
        """The same, with these names where none were given."""
        return self if self.classes else replace(self, classes=names)

    def or_warn(self, done: Callable[[], NetworkModel]) -> NetworkModel | None:
        """A model, or a warning in place of an error: a training is worth more than its calibration."""
        try:
            return done()
        except Warning:  # somebody wants warnings as errors
            raise
        except Exception as error:
            warnings.warn(
                f"Training has ended well, but its calibration has not, and {self.path} was not written: {error}. The "
                "network is as it was trained; mend it and use dapcal.calibrate",
                DapcalWarning,
                stacklevel=2,
            )
            return None

    def _train(self, seen: Data | None) -> Data:
        given = seen if self.train is None else self.train
        if given is None:
            raise ValueError("Expected training data, and the trainer has no loader of them; give `train`")
        return given

    def _held_out(self, validation: Data | None) -> Data:
        given = validation if self.held_out is None else self.held_out
        if given is None:
            raise ValueError("Expected held-out data, and there are no validation data; give `held_out`")
        return given

    def rows(self, n: int) -> Tensor:
        """Which of n rows of validation data the calibration looks at, ascending."""
        order = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed))
        return order[: max(1, round(self.share * n))].sort().values
