"""CIFAR-10's trap: smooth images are near everything in pixels, so that a distance between pixels would mislead.

A small ResNet on 10,000 images of CIFAR-10, a few epochs: one network (last-layer Laplace) and an ensemble of three, by
two seeds. Printed and written: why each space is in or out, and the AUROC of the entropy and of the OOD score against
SVHN and CIFAR-100 (which chose nothing). SVHN is cropped anew, not bit by bit the published one.

Networks this weak are right on about 57 % of test images. Pixels were out in all four cases; with seed 0 all else was
out, too, and the score is the entropy alone, with seed 1 class means were in and the score is 2 to 6 points above it.
A better network takes an accelerator: --train 49000 --epochs 30 --width 64.

Run: DAPCAL_DATA=<folder> python benchmarks/pixel_trap.py [--out result.json] [--train N] [--epochs N] [--width N]
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

import dapcal
from dapcal.likelihoods import Categorical
from dapcal.posteriors import ensemble, laplace
from dapcal.posteriors.network import NetworkPosterior
from dapcal.posteriors.training import cosine
from dapcal.ranks import auroc

HELD_OUT, TEST = 1000, 1000  # images; outliers as many as of the test set
SEEDS, MEMBERS = 2, 3


def main() -> None:
    asked = argparse.ArgumentParser(description="CIFAR-10's trap")
    asked.add_argument("--out", type=Path)
    for name, value in (("train", 10_000), ("epochs", 4), ("width", 16)):
        asked.add_argument(f"--{name}", type=int, default=value)
    options = asked.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts = {name: (x.to(device), y.to(device)) for name, (x, y) in data(options.train).items()}
    found = [row for seed in range(SEEDS) for row in run(parts, options, seed)]
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    result = {"torch": torch.__version__, "dapcal": dapcal.__version__, "device": str(device), **settings}
    if options.out:
        options.out.write_text(json.dumps(result | {"rows": found}, indent=1) + "\n", encoding="utf-8")
    trapped = [row for row in found if "inputs" in row["distances"]]
    worse = [row for row in found for name in ("svhn", "cifar100") if row["score"][name] < row["entropy"][name]]
    print(f"pixels let in: {len(trapped)} of {len(found)}; OOD score below entropy: {len(worse)} of {2 * len(found)}")


def data(number: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Parts of the data, inputs in [0, 1]."""
    from dapcal.experiments.datasets import cifar10, cifar100, svhn

    train, test = cifar10("train"), cifar10("test")
    rows = torch.randperm(len(train.y), generator=torch.Generator().manual_seed(0))[: number + HELD_OUT]
    parts = {
        "train": (train.x[rows[:number]], train.y[rows[:number]]),
        "held_out": (train.x[rows[number:]], train.y[rows[number:]]),
        **{name: (x[:TEST], y[:TEST]) for name, (x, y) in {
            "test": test, "svhn": svhn("test"), "cifar100": cifar100("test"),
        }.items()},
    }  # fmt: skip
    return {name: (x.float() / 255, y) for name, (x, y) in parts.items()}


def run(parts: dict[str, tuple[Tensor, Tensor]], options: argparse.Namespace, seed: int) -> list[dict]:
    """One row for each posterior."""
    start = time.perf_counter()
    train = parts["train"]
    members = ensemble.fit(
        lambda: ResNet(options.width).to(train[0].device), Categorical(), train, members=MEMBERS, epochs=options.epochs,
        batch_size=128, learning_rate=3e-3, schedule=cosine, seed=seed,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    scale = laplace.HeldOut(parts["held_out"], lowest=1e-4)
    alone = laplace.last_layer(members.network, Categorical(), train, prior_scale=scale)
    found = [row_of(name, own, parts) for name, own in (("one network, Laplace", alone), ("ensemble", members))]
    return [{"seed": seed, "members": MEMBERS, "training_s": round(seconds, 1)} | row for row in found]


def row_of(name: str, posterior: NetworkPosterior, parts: dict[str, tuple[Tensor, Tensor]]) -> dict:
    """What calibration decides, and what comes of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dapcal.DapcalWarning)
        calibrated = dapcal.calibrate(posterior, train=parts["train"], held_out=parts["held_out"])
    seen = {part: calibrated.predict(parts[part][0]) for part in ("test", "svhn", "cifar100")}
    inside, y = seen["test"], parts["test"][1].cpu()

    def aurocs(score) -> dict[str, float]:
        return {part: round(100 * auroc(score(seen[part]), score(inside)), 2) for part in ("svhn", "cifar100")}

    row = {
        "posterior": name,
        "accuracy": round(float((inside.probs.argmax(1) == y).double().mean()), 4),
        "nll": {
            "before": round(float(-inside.base.log_prob(y).mean()), 4),
            "after": round(float(-inside.log_prob(y).mean()), 4),
        },
        "entropy": aurocs(lambda p: p.likelihood.doubt(p.base_ensemble)),
        "entropy_after": aurocs(lambda p: p.likelihood.doubt(p.ensemble)),
        "score": aurocs(lambda p: p.ood_score),
        "distances": [space.name for space in calibrated.distance.spaces],
        "further": [space.name for space in calibrated.evidence.further],
        "phi": calibrated.phi,
        "notes": list(calibrated.notes),
    }
    print(json.dumps(row, indent=1), flush=True)
    return row


class ResNet(nn.Module):
    """Three residual blocks after a stem of stride 2."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2))
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, 10)."""
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside))
        self.two = nn.Sequential(nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside))
        same = stride == 1 and inside == outside
        self.short = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, C, H, W)."""
        return relu(self.two(relu(self.one(x))) + self.short(x))


if __name__ == "__main__":
    main()
