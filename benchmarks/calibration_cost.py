"""What a hundred values of φ cost, in passes of LeNet-5's draws over the calibration inputs.

Run: python benchmarks/calibration_cost.py
"""

from __future__ import annotations

import sys
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
    module = sys.modules["dapcal.calibrate"]  # the package's attribute of that name is the function
    search = module.search
    for adjust in (dapcal.adjust.Inflate(), dapcal.adjust.Reweight()):
        times: list[float] = []

        def timed(*args, times=times, **options):
            start = time.perf_counter()
            found = search(*args, **options)
            times.append(time.perf_counter() - start)
            return found

        module.search = timed
        for _ in range(3):
            dapcal.calibrate(
                posterior,
                train=train,
                held_out=held_out,
                ood=dapcal.calibration.inputs.Hardest(),
                distance=dapcal.distances.Space(),
                adjust=adjust,
                candidates=100,
            )
        print(
            f"{type(adjust).__name__}: searching 100 values of φ and refining costs {min(times) / one_pass:.2f} passes"
        )


if __name__ == "__main__":
    main()
