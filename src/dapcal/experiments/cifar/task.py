"""The CIFAR-10 experiment as data, read from `plan.toml`: what is run is what was written down before."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dapcal.experiments.cifar.networks import small_resnet, wide_resnet
from dapcal.experiments.images.bench import ImageTask

FILE = Path(__file__).parent / "plan.toml"


@dataclass(frozen=True, kw_only=True)
class PhotoTask(ImageTask):
    """What is learnt, what counts as out of distribution, and how networks and posteriors are trained.

    Attributes:
        train: training images, of those that are not held out.
        test: images of every test set, at most.
        made: images of each set of our own making.
        compiled: networks are trained by `torch.compile`.
        weight_decay: of SGD, for all parameters.
        sigma0: prior scale of VI, SWAG and the paper's estimator.
        kl_weight: λ.
        initial_scale: σ of VI at the start.
        variational_epochs: of VI, from the MAP network on.
        swag_rate: learning rate of SWAG.
        swag_per_epoch: iterates that SWAG collects in an epoch.
        tuning: held-out images, and images of noise, that ODIN is tuned on.
        learnt_kept: training images whose features are kept in a file.
    """

    train: int
    test: int
    made: int
    compiled: bool
    weight_decay: float
    sigma0: float
    kl_weight: float
    initial_scale: float
    variational_epochs: int
    swag_rate: float
    swag_per_epoch: int
    tuning: int
    learnt_kept: int

    @property
    def settings(self) -> dict[str, Any]:
        """In plain words, for the result file."""
        about = {name: plan()[name] for name in ("rule", "scoring", "not_blind", "beside")}
        return {**asdict(self), "network": self.network.__doc__, **about, "how": self.how}

    @property
    def how(self) -> str:
        """How networks and posteriors are trained, for the page."""
        return (
            f"{self.epochs} epochs on {self.train:,} images in batches of {self.batch_size}, shifted by up to 4 pixels "
            "and flipped (for the large network with a square of mean colour, 8 pixels wide); SGD with Nesterov "
            f"momentum 0.9 at {self.learning_rate:g}, falling to zero along a cosine, weight decay "
            f"{self.weight_decay:g}; in bfloat16 on a GPU. VI starts from the MAP network: "
            f"{self.variational_epochs} epochs, KL tempered by λ = {self.kl_weight:g}, σ0 = {self.sigma0:g}, "
            f"{self.draws} draws. SWAG: {self.swag_epochs} epochs at {self.swag_rate:g}, {self.draws} draws"
        )


def task_for(device: str) -> PhotoTask:
    """The paper's network on a GPU, a small one on a CPU."""
    kind = "cuda" if device.startswith("cuda") else "cpu"
    found = plan()["settings"]
    common = {name: value for name, value in found.items() if not isinstance(value, dict)}
    network = wide_resnet if kind == "cuda" else small_resnet
    return PhotoTask(outside=tuple(plan()["outside"]), network=network, **common, **found[kind])


@cache
def plan() -> dict[str, Any]:
    """The file as it is."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))
