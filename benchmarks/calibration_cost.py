"""What a hundred values of φ cost, in passes of LeNet-5's draws over the calibration inputs.

Run: python benchmarks/calibration_cost.py
"""

from __future__ import annotations

import time
import warnings

import torch
from torch import nn

import dapcal


def lenet5() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10),
    )  # fmt: skip


def seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    torch.manual_seed(0)
    warnings.simplefilter("ignore")  # an untrained network: φ itself is of no interest here
    model = lenet5()
    scale = {n: torch.full_like(p, 0.05) for n, p in model.named_parameters()}
    posterior = dapcal.posteriors.gaussian.diagonal(model, dapcal.likelihoods.Categorical(), scale, draws=50)
    x, y = torch.rand(3000, 1, 28, 28), torch.arange(3000) % 10
    train, held_out = (x[:2000], y[:2000]), (x[2000:], y[2000:])
    inputs = x[2000:2650]  # as many as choose φ: half of the held-out inputs and those that are hard
    one_pass = min(seconds(lambda: posterior.outputs(inputs)) for _ in range(3))
    print(f"one pass of 50 draws over {len(inputs)} inputs: {one_pass:.2f} s")
    for adjust in (dapcal.adjust.Inflate(), dapcal.adjust.Reweight()):

        def calibrate(candidates: int, adjust=adjust) -> None:
            space, hard = dapcal.distances.Space(), dapcal.ood_inputs.Hardest()
            data = {"train": train, "held_out": held_out, "ood": hard}
            dapcal.calibrate(posterior, **data, adjust=adjust, distance=space, candidates=candidates)

        few, many = (min(seconds(lambda n=n, f=calibrate: f(n)) for _ in range(3)) for n in (3, 103))
        print(f"{type(adjust).__name__}: 100 values of φ cost {(many - few) / one_pass:.2f} passes")


if __name__ == "__main__":
    main()
