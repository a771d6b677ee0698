"""What distance costs on a GPU: `Calibrated` over WideResNet-28-10 beside the passes of the network alone.

One network, its last layer by Laplace, distances to the features of 49,000 training images of CIFAR-10; bfloat16 and
channels last, as the network has them. Ways take turns. Passes are those of a batch of images that lie on the GPU, in
inference mode, until the answer is there; the same for the posterior without distances.

Run: DAPCAL_DATA=<folder> python benchmarks/gpu_passes.py [--weights network.safetensors] [--out results/gpu.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

import dapcal
from dapcal.ensembles import seen
from dapcal.experiments.cifar.networks import wide_resnet
from dapcal.experiments.datasets import as_floats, cifar10
from dapcal.experiments.records import environment
from dapcal.files import write_text
from dapcal.likelihoods import Categorical
from dapcal.types import Posterior

HELD_OUT = 1000


def main() -> None:
    asked = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    asked.add_argument("--weights", type=Path, help="of a trained network; without them an untrained one")
    asked.add_argument("--images", type=int, default=10_000)
    asked.add_argument("--repeats", type=int, default=5)
    asked.add_argument("--out", type=Path)
    options = asked.parse_args()
    warnings.simplefilter("ignore", dapcal.DapcalWarning)
    torch.manual_seed(0)
    learnt = cifar10("train")
    x, y = as_floats(learnt.x).cuda(), learnt.y.cuda()
    train, held_out = (x[HELD_OUT:], y[HELD_OUT:]), (x[:HELD_OUT], y[:HELD_OUT])
    new = as_floats(cifar10("test").x[: options.images]).cuda()
    network = wide_resnet(0.0).cuda().to(memory_format=torch.channels_last).eval()
    if options.weights is not None:
        network.load_state_dict(load_file(options.weights, device="cuda"))
    passes_of_all = seconds(lambda: network(x), 3)
    started = time.perf_counter()
    calibrated = dapcal.calibrate(network, Categorical(), train=train, held_out=held_out)
    torch.cuda.synchronize()
    calibrating = time.perf_counter() - started
    rows = {size: ratios(network, calibrated, new, size, options.repeats) for size in (100, 500, 2000)}
    result = {
        "experiment": "gpu",
        "environment": environment("cuda"),
        "trained": options.weights is not None,
        "images": len(new),
        "training_images": len(train[0]),
        "notes": list(calibrated.notes),
        "calibrate_seconds": round(calibrating, 2),
        "passes_of_training_images_seconds": round(statistics.median(passes_of_all), 3),
        "rows": rows,
    }
    print(json.dumps(result, indent=1))
    if options.out is not None:
        write_text(options.out, json.dumps(result, indent=1) + "\n")


def ratios(
    network: torch.nn.Module, calibrated: dapcal.Calibrated, x: Tensor, size: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds of each way for all images in batches of a size, run by run."""
    ways: dict[str, Callable[[], object]] = {
        "network": lambda: [network(part).softmax(-1) for part in x.split(size)],
        "posterior": lambda: [alone(calibrated.posterior, part) for part in x.split(size)],
        "calibrated": lambda: [answers(calibrated, part) for part in x.split(size)],
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for name in ways:
        seconds(ways[name], 1)
    for _ in range(repeats):
        for name, way in ways.items():
            found[name] += seconds(way, 1)
    return found


def alone(posterior: Posterior, x: Tensor) -> Tensor:
    """Probabilities of a posterior without distances."""
    return posterior.likelihood.log_mean(seen(posterior, x)).exp()


def answers(calibrated: dapcal.Calibrated, x: Tensor) -> tuple[Tensor, Tensor]:
    prediction = calibrated(x)
    return prediction.probs, prediction.ood_p_value


def seconds(way: Callable[[], object], times: int) -> list[float]:
    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        started = time.perf_counter()
        with torch.inference_mode():
            way()
        torch.cuda.synchronize()
        found.append(round(time.perf_counter() - started, 4))
    return found


if __name__ == "__main__":
    main()
